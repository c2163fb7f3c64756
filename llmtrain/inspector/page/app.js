// The frame: what is being looked at, the parts in their order, language and theme, the keys.
//
// A part has a key (its words), and `build(place)`, which fills its place and gives the function that shows the state
// there. The state is all that parts share: the step (how many tokens of the answer are written), the token looked at,
// layer and head, the sampling settings. Only `set` changes it.

const PARTS = [tokensPart, embeddingPart, positionPart, attentionPart, cachePart, choicePart, loopPart, layersPart];
const state = { step: 0, at: recording.promptLength - 1, ...tellingHead(), sampling: { ...recording.sampling }, playing: false };
const last = () => recording.promptLength + state.step - 1; // the newest token written
const lastRead = () => Math.min(last(), recording.readLength - 1); // nothing reads the very last one
let shows = [];

function set(changes) {
  const before = { ...state };
  Object.assign(state, changes);
  state.step = Math.min(Math.max(state.step, 0), recording.answerLength);
  if (state.step !== before.step && changes.at === undefined) state.at = lastRead();
  state.at = Math.min(Math.max(state.at, 0), last());
  for (const show of shows) show(state, before);
  if (state.step !== before.step) announce();
}

function announce() {
  if (state.playing) return;
  const token = recording.tokens[last()];
  document.getElementById("status").textContent = state.step ? `${state.step} / ${recording.answerLength}: ${token.label}` : say("toStart");
}

// ---- Building ----

function hero() {
  return h("div", { class: "hero" },
    h("h1", null, say("title")), h("p", { class: "lede" }, say("lede")),
    h("p", { class: "line", dir: "auto" }, recording.prompt, h("em", null, recording.answer)), h("p", { class: "keys" }, say("keys")));
}

function section(part, index) {
  const sentence = typeof part.sentence === "function" ? part.sentence() : `${part.key}Say`;
  const place = h("section", { class: `part ${part.key}`, id: part.key, "aria-labelledby": `${part.key}-title` },
    h("div", { class: "head" }, h("b", { "aria-hidden": "true" }, String(index + 1)),
      h("h2", { id: `${part.key}-title` }, say(part.key)), h("p", null, say(sentence))));
  return { place, show: part.build(place) };
}

function build() {
  document.documentElement.lang = say("locale");
  document.documentElement.toggleAttribute("data-theme", settings.theme !== null);
  if (settings.theme) document.documentElement.dataset.theme = settings.theme;
  document.title = `${say("title")} · ${recording.text.slice(0, 40)}`;
  for (const each of document.querySelectorAll("[data-text]")) each.textContent = say(each.dataset.text);
  for (const each of document.querySelectorAll("[data-label]")) {
    each.title = say(each.dataset.label);
    each.setAttribute("aria-label", say(each.dataset.label));
  }
  document.getElementById("model").textContent = recording.modelLine();
  document.getElementById("parts").replaceChildren(h("ol", null, PARTS.map((part, index) =>
    h("li", null, h("a", { href: `#${part.key}` }, h("b", null, String(index + 1)), say(part.key))))));
  const built = PARTS.map(section);
  document.getElementById("main").replaceChildren(
    hero(), ...built.map((each) => each.place), h("p", { class: "foot" }, recording.footLine()));
  shows = [...built.map((each) => each.show), buildPlayer(document.getElementById("player"))];
  for (const show of shows) show(state, null);
  watchParts();
}

let watcher = null;
function watchParts() {
  watcher?.disconnect();
  watcher = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      for (const link of document.querySelectorAll("#parts a")) {
        if (link.hash === `#${target.id}`) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      }
    }
  }, { rootMargin: "-30% 0px -60% 0px" });
  for (const each of document.querySelectorAll(".part")) watcher.observe(each);
}

// ---- Language, theme, keys ----

function rebuild() {
  const { scrollX, scrollY } = window;
  build();
  window.scrollTo({ left: scrollX, top: scrollY, behavior: "instant" });
}

document.getElementById("language").addEventListener("click", () => {
  settings.remember({ language: settings.language === "zh" ? "en" : "zh" });
  rebuild();
});
document.getElementById("theme").addEventListener("click", () => {
  const dark = !settings.dark();
  settings.remember({ theme: dark === settings.system.matches ? null : dark ? "dark" : "light" });
  rebuild();
});
settings.system.addEventListener("change", rebuild);

document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  if (event.target.closest("input, select, textarea")) return;
  if (event.key === " " && !event.target.closest("button, a")) {
    event.preventDefault();
    togglePlay();
  } else if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
    event.preventDefault();
    stopPlaying();
    set({ step: state.step + (event.key === "ArrowRight" ? 1 : -1) });
  }
});

build();
