// Part 7, and the player at the foot of the page: the answer token by token, and why it ended.

const PLAY = "M8 5.5v13l10.5-6.5z";
const PAUSE = "M7.5 5.5h3v13h-3zM13.5 5.5h3v13h-3z";
const SPEEDS = [["½", 1800], ["1", 900], ["3", 300]];
let pace = 1;
let timer = null;

function stopPlaying() {
  clearTimeout(timer);
  timer = null;
  if (state.playing) set({ playing: false });
}

function togglePlay() {
  if (state.playing) return stopPlaying();
  if (!recording.answerLength) return;
  const tick = () => {
    if (state.step >= recording.answerLength) return stopPlaying();
    set({ step: state.step + 1 });
    timer = setTimeout(tick, SPEEDS[pace][1]);
  };
  set({ playing: true, step: state.step >= recording.answerLength ? 0 : state.step });
  timer = setTimeout(tick, SPEEDS[pace][1] / 2);
}

function go(step) {
  stopPlaying();
  set({ step });
}

function controlButton(word, path, press, attributes) {
  return h("button", { class: "plain", "aria-label": say(word), title: say(word), click: press, ...attributes }, icon(path, true));
}

function buildPlayer(place) {
  const strip = h("div", { id: "strip", role: "group", "aria-label": say("promptAndAnswer") });
  const buttons = tokenButtons(strip, "strip");
  const toStart = controlButton("toStart", "M6 6h2.4v12H6zM19 6v12l-9.5-6z", () => go(0), { class: "plain extra" });
  const back = controlButton("back", "M16.5 6v12L7.5 12z", () => go(state.step - 1), { id: "back" });
  const play = h("button", { id: "play", click: togglePlay });
  const on = controlButton("on", "M7.5 6v12l9-6z", () => go(state.step + 1), { id: "on" });
  const toEnd = controlButton("toEnd", "M15.6 6H18v12h-2.4zM5 6v12l9.5-6z", () => go(recording.answerLength), { class: "plain extra" });
  const scrub = h("input", {
    type: "range", class: "scrub", id: "scrub", min: 0, max: recording.answerLength, step: 1, "aria-label": say("stepLabel"),
    input: (event) => go(Number(event.target.value)),
  });
  const count = h("output", { for: "scrub" });
  const speed = h("button", { class: "plain extra", click: () => { pace = (pace + 1) % SPEEDS.length; showSpeed(); } });
  const showSpeed = () => {
    speed.textContent = `${SPEEDS[pace][0]}×`;
    speed.title = say("speed");
    speed.setAttribute("aria-label", `${say("speed")} ${SPEEDS[pace][0]}×`);
  };
  showSpeed();
  place.replaceChildren(h("div", null, strip, h("div", { class: "controls" }, toStart, back, play, on, toEnd, scrub, count, speed)));
  return (now) => {
    buttons.show(now);
    const end = recording.answerLength;
    for (const each of [toStart, back]) each.disabled = now.step === 0;
    for (const each of [on, toEnd]) each.disabled = now.step === end;
    play.disabled = scrub.disabled = end === 0;
    const word = say(now.playing ? "pause" : "play");
    play.title = word;
    play.setAttribute("aria-label", word);
    play.replaceChildren(icon(now.playing ? PAUSE : PLAY, true));
    scrub.value = now.step;
    count.textContent = say("stepOf", now.step, end);
    scrollInside(strip, buttons.at(now.at));
  };
}

// Brings an element into view inside its scroller without moving the page.
function scrollInside(scroller, element) {
  const [outer, inner] = [scroller.getBoundingClientRect(), element.getBoundingClientRect()];
  const room = outer.width / 3;
  let by = 0;
  if (inner.right > outer.right - room) by = inner.right - (outer.right - room);
  else if (inner.left < outer.left + room) by = inner.left - (outer.left + room);
  scroller.scrollBy({ left: by, behavior: settings.still() ? "instant" : "smooth" });
}

// ---- The part ----

const loopPart = {
  key: "loop",
  build(place) {
    if (!recording.answerLength) {
      place.append(h("p", { class: "note" }, say("noAnswer")));
      return () => {};
    }
    const text = h("div", { class: "text card", role: "group", "aria-label": say("promptAndAnswer") });
    const buttons = tokenButtons(text, "loop");
    const rows = recording.steps.map((step, index) => {
      const token = recording.tokens[recording.promptLength + index];
      return h("tr", { click: () => go(index + 1) },
        h("td", { class: "figure" }, String(index + 1)), h("td", null, h("code", null, shown(token))),
        h("td", { class: "figure" }, String(token.id)), h("td", { class: "figure" }, step.chance === null ? "–" : number.percent(step.chance)),
        h("td", { class: "figure" }, number.count(step.rank)),
        h("td", { class: "figure" }, step.uniform === null ? "–" : number.plain(step.uniform, 4)),
        h("td", { class: "figure" }, step.seconds === null ? "–" : number.ms(step.seconds)));
    });
    const table = h("table", { class: "candidates steps" },
      h("thead", null, h("tr", null, ["", "piece", "id", "probability", "rank", "uniformShort", "stepTime"].map((word) =>
        h("th", { scope: "col" }, word && say(word))))), h("tbody", null, rows));
    place.append(text,
      h("div", { class: "ending" }, h("h3", null, say("ended")), h("p", null, recording.endedBecause())),
      h("details", null, h("summary", null, say("table")), h("div", { class: "sideways" }, table)));
    return (now) => {
      buttons.show(now);
      rows.forEach((row, index) => row.classList.toggle("here", index + 1 === now.step));
    };
  },
};
