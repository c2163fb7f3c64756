// The chat page: sends what is written to the server that the page came from, and shows the answer as it comes. Knows the
// shape of the API and nothing of the engine, and keeps no conversation.

import { AnswerText, hideCandidates, make, showCandidates, walk } from "./answer.js";
import { Refusal, call, documents, tokensOf } from "./api.js";
import { EXAMPLES, SEED_HELP, SLIDERS, WORDS, pick, preferences, remember, say } from "./words.js";

const byId = (id) => document.getElementById(id);

// ---- The conversation ----

const transcript = byId("transcript");
let exchanges = []; // {mode, prompt, answer: AnswerText, element, figures, ended, error}
let running = null; // {exchange, controller} while an answer comes
let frame = 0; // of the browser, in which to scroll
let following = true; // whether the end is kept in sight
let lastTop = 0;
let recorded = false; // whether the server can show what happened inside an answer

/** What is sent for an exchange, given those before it. */
function requestFor(exchange, earlier) {
  const { candidates, seed, ...sampling } = settings();
  const shared = { model: byId("model").value, ...sampling, ...(seed !== null && { seed }), stream: true, stream_options: { include_usage: true } };
  if (exchange.mode === "continue") return ["v1/completions", { ...shared, prompt: exchange.prompt, logprobs: candidates }];
  const system = byId("system").value.trim();
  const messages = [
    ...(system ? [{ role: "system", content: system }] : []),
    ...earlier.filter((each) => each.mode === "chat").flatMap((each) => [
      { role: "user", content: each.prompt }, { role: "assistant", content: each.answer.text },
    ]),
    { role: "user", content: exchange.prompt },
  ];
  return ["v1/chat/completions", { ...shared, messages, logprobs: true, top_logprobs: candidates }];
}

async function ask(prompt, mode = preferences.mode) {
  // What failed without a word of answer is no part of the conversation.
  if (exchanges.at(-1)?.error && !exchanges.at(-1).answer.text) exchanges.pop().element.remove();
  const exchange = { mode, prompt, figures: {}, ended: null, error: null };
  const request = (exchange.request = requestFor(exchange, exchanges));
  draw(exchange);
  exchanges.push(exchange);
  running = { exchange, controller: new AbortController() };
  announce(say("writing"));
  showState();
  following = true;
  follow();
  try {
    await receive(exchange, request, running.controller.signal);
  } catch (error) {
    if (error.name === "AbortError") exchange.ended = "stopped";
    else exchange.error = sentenceFor(error);
  } finally {
    exchange.answer.finish();
    if (running?.exchange === exchange) running = null;
    announce(exchange.error ?? exchange.answer.text);
    showState();
    follow();
  }
}

/** What to tell of a failure; for a missing key there is a field. A fault of the page's own goes to the console. */
function sentenceFor(error) {
  if (!(error instanceof Refusal)) throw error;
  if (error.status === 401) byId("key-field").hidden = false;
  return error.message;
}

async function receive(exchange, [path, body], signal) {
  const { figures } = exchange;
  const begin = performance.now();
  const response = await call(path, { method: "POST", body: JSON.stringify(body), signal });
  for await (const document of documents(response)) {
    const choice = document.choices?.[0];
    const tokens = choice ? tokensOf(choice) : [];
    const text = choice?.text ?? choice?.delta?.content ?? "";
    if (tokens.length || text) {
      const now = performance.now();
      figures.first ??= now - begin;
      figures.began ??= now;
      figures.early ??= tokens.length; // those that came with the first: no time passed for them
      figures.last = now;
      figures.tokens = (figures.tokens ?? 0) + tokens.length;
      exchange.answer.add(text, tokens);
      follow();
    }
    exchange.ended = choice?.finish_reason ?? exchange.ended;
    figures.seed = document.llmtrain?.seed ?? figures.seed; // our server's extra: the seed that gives this text again
    if (document.usage) {
      figures.tokens = document.usage.completion_tokens;
      figures.prompt = document.usage.prompt_tokens;
      figures.cached = document.usage.prompt_tokens_details?.cached_tokens ?? 0;
    }
  }
}

/** The elements of an exchange. In a continued text the given beginning and the answer are one paragraph. */
function draw(exchange) {
  const text = make("div", { className: "text answer" });
  exchange.foot = make("div", { className: "foot" });
  exchange.element = make("article", { className: "exchange" });
  if (exchange.mode === "chat") {
    exchange.element.append(make("div", { className: "question" }, make("div", { className: "text" }, exchange.prompt)));
  } else {
    text.append(make("span", { className: "given" }, exchange.prompt));
  }
  exchange.answer = new AnswerText(text);
  exchange.element.append(text, exchange.foot);
  transcript.append(exchange.element);
}

/** Everything that depends on the state or the language and is not the text itself. */
function showState() {
  for (const exchange of exchanges) {
    const busy = running?.exchange === exchange;
    exchange.element.classList.toggle("busy", busy);
    exchange.element.querySelector(".error")?.remove();
    if (exchange.error) exchange.foot.before(make("p", { className: "error" }, exchange.error));
    const last = exchange === exchanges.at(-1) && !running;
    exchange.foot.replaceChildren(figuresOf(exchange), ...(last ? [actionsOf(exchange)] : []));
  }
  byId("welcome").hidden = exchanges.length > 0;
  const send = byId("send");
  send.querySelector("use").setAttribute("href", running ? "#icon-stop" : "#icon-send");
  send.ariaLabel = send.title = say(running ? "stop" : "send");
  send.disabled = !running && !byId("message").value.trim();
}

function figuresOf({ figures, ended }) {
  const seconds = (figures.last - figures.began) / 1000;
  const after = figures.tokens - figures.early;
  const parts = [
    figures.first !== undefined && say("first", Math.round(figures.first)),
    seconds > 0 && after > 0 && say("speed", after / seconds < 10 ? (after / seconds).toFixed(1) : Math.round(after / seconds)),
    figures.tokens && say("tokens", figures.tokens),
    figures.prompt && (figures.cached ? say("cached", figures.prompt, figures.cached) : say("prompt", figures.prompt)),
    figures.seed !== undefined && `seed ${figures.seed}`,
    ended && (WORDS[`ended_${ended}`] ? say(`ended_${ended}`) : ended),
  ];
  return make("span", { className: "figures" }, ...parts.filter(Boolean).map((part) => make("span", {}, part)));
}

function actionsOf(exchange) {
  const button = (word, action) => make("button", { type: "button", className: "quiet", onclick: action }, say(word));
  const actions = [
    button("edit", () => {
      remove(exchange);
      byId("message").value = exchange.prompt;
      setMode(exchange.mode);
      fit();
      byId("message").focus();
    }),
    button("retry", () => {
      remove(exchange);
      ask(exchange.prompt, exchange.mode);
    }),
  ];
  if (recorded && exchange.figures.seed !== undefined && exchange.figures.tokens) {
    actions.push(button("inside", () => lookInside(exchange)));
  }
  if (exchange.mode === "continue" && exchange.answer.text) {
    actions.push(button("goOn", () => {
      remove(exchange);
      ask(exchange.prompt + exchange.answer.text, "continue");
    }));
  }
  return make("span", { className: "actions" }, ...actions);
}

/** Has the same answer given once more, recorded, and opens its page: in a window opened at once, as browsers demand. */
async function lookInside({ request: [path, body], figures, ended }) {
  const view = open("", "_blank");
  if (view) view.opener = null;
  const { stream, stream_options: _, ...same } = body;
  const length = ended === "stopped" ? { max_tokens: figures.tokens } : {};
  announce(say("looking"));
  try {
    const options = { method: "POST", body: JSON.stringify({ ...same, seed: figures.seed, ...length }) };
    const { path: page } = await (await call(path.replace(/^v1/, "inspect"), options)).json();
    if (view) view.location.replace(page);
    announce("");
  } catch (error) {
    view?.close();
    announce(sentenceFor(error));
  }
}

function remove(exchange) {
  hideCandidates();
  exchange.element.remove();
  exchanges = exchanges.filter((each) => each !== exchange);
  showState();
}

/** Keeps the newest line in sight while the answer grows, unless the reader has scrolled up; once for each frame. */
function follow() {
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(() => {
    if (!following) return;
    transcript.scrollTop = transcript.scrollHeight;
    lastTop = transcript.scrollTop;
  });
}

function noticeScrolling() {
  hideCandidates();
  if (transcript.scrollTop < lastTop) following = false; // only a reader goes up
  if (transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight < 60) following = true;
  lastTop = transcript.scrollTop;
}

const announce = (text) => { byId("status").textContent = text; };

// ---- The settings ----

/** The settings as a request takes them; a seed of null is left out. */
function settings() {
  const seed = byId("seed").value.trim();
  const values = SLIDERS.map(([name]) => [name, Number(byId(name).value)]);
  return { ...Object.fromEntries(values), seed: seed === "" ? null : Number(seed) };
}

function drawSettings() {
  const fields = SLIDERS.map(([name, min, max, step, standard, ...help]) => {
    const value = preferences.sampling[name] ?? standard;
    return make("div", { className: "field" },
      make("div", { className: "row" }, make("label", { htmlFor: name }, name), make("output", { htmlFor: name })),
      make("input", { type: "range", id: name, min, max, step, value }), make("p", { help }));
  });
  const seed = make("input", { id: "seed", inputMode: "numeric", pattern: "[0-9]{1,15}", value: preferences.sampling.seed ?? "" });
  fields.push(make("div", { className: "field" }, make("label", { htmlFor: "seed" }, "seed"), seed, make("p", { help: SEED_HELP })));
  byId("sliders").replaceChildren(...fields);
}

/** Shows the values; what is no number of at most fifteen digits is taken out of the seed (beyond, numbers here are not exact). */
function showValues() {
  byId("seed").value = byId("seed").value.replace(/[^0-9]/g, "").slice(0, 15);
  for (const [name, , , step] of SLIDERS) {
    byId(name).parentElement.querySelector("output").value = Number(byId(name).value).toFixed(step < 1 ? 2 : 0);
  }
  remember({ sampling: settings(), system: byId("system").value });
}

function openSettings(open) {
  byId("settings").hidden = !open;
  byId("open-settings").ariaExpanded = String(open);
  byId(open ? "close-settings" : "open-settings").focus();
}

function setMode(mode) {
  remember({ mode });
  document.querySelector(`input[name=mode][value=${mode}]`).checked = true;
  byId("system-field").hidden = mode !== "chat";
  showLanguage();
}

// ---- Language and theme ----

function showLanguage() {
  document.documentElement.lang = preferences.language === "zh" ? "zh-CN" : "en";
  for (const element of document.querySelectorAll("[data-text]")) element.textContent = say(element.dataset.text);
  for (const element of document.querySelectorAll("[data-label]")) {
    element.ariaLabel = say(element.dataset.label);
    if (element.tagName === "BUTTON") element.title = element.ariaLabel;
  }
  for (const element of document.querySelectorAll("[data-hint]")) element.placeholder = say(element.dataset.hint);
  for (const element of document.querySelectorAll("#sliders p")) element.textContent = pick(...element.help);
  byId("seed").placeholder = say("fresh");
  const chat = preferences.mode === "chat";
  byId("message").placeholder = say(chat ? "messageHint" : "textHint");
  byId("welcome-title").textContent = say(chat ? "welcomeChat" : "welcomeText");
  byId("welcome-text").textContent = say(chat ? "welcomeChatText" : "welcomeTextText");
  byId("examples").replaceChildren(...EXAMPLES[preferences.mode].map((text) =>
    make("button", { type: "button", onclick: () => ask(text) }, text)));
  showState();
}

function showTheme() {
  if (preferences.theme) document.documentElement.dataset.theme = preferences.theme;
}

function switchTheme() {
  const dark = preferences.theme ? preferences.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  remember({ theme: dark ? "light" : "dark" });
  showTheme();
}

// ---- Models ----

async function listModels() {
  try {
    const { data, inspect } = await (await call("v1/models")).json();
    recorded = inspect === true;
    const name = (model) => (model.parent ? `${model.id} (${say("adapter")})` : model.id);
    byId("model").replaceChildren(...data.map((model) => make("option", { value: model.id }, name(model))));
    if (data.some((model) => model.id === preferences.model)) byId("model").value = preferences.model;
    byId("max_tokens").max = Math.min(1000, ...data.map((model) => model.max_model_len ?? 1000)); // more would be refused
    showValues();
  } catch (error) {
    const sentence = sentenceFor(error);
    announce(sentence);
    byId("welcome-text").textContent = sentence;
    if (!byId("key-field").hidden) openSettings(true);
  }
}

// ---- What people do ----

function submit() {
  const prompt = byId("message").value;
  if (running || !prompt.trim()) return;
  byId("message").value = "";
  fit();
  ask(preferences.mode === "chat" ? prompt.trim() : prompt);
}

const stop = () => running?.controller.abort();

/** The field for the message is as high as its text. */
function fit() {
  byId("message").style.height = "auto";
  byId("message").style.height = `${byId("message").scrollHeight}px`;
  byId("send").disabled = !running && !byId("message").value.trim();
}

function listen() {
  const on = (id, kind, action) => byId(id).addEventListener(kind, action);
  on("composer", "submit", (event) => { event.preventDefault(); if (running) stop(); else submit(); });
  on("message", "input", fit);
  on("message", "keydown", (event) => {
    // While Chinese is composed, Enter takes a suggestion and sends nothing (229 is Safari's way to say so).
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
    event.preventDefault();
    submit();
  });
  on("new", "click", () => { stop(); [...exchanges].forEach(remove); byId("message").focus(); });
  on("language", "click", () => { remember({ language: pick("zh", "en") }); showLanguage(); listModels(); });
  on("theme", "click", switchTheme);
  on("open-settings", "click", () => openSettings(byId("settings").hidden));
  on("close-settings", "click", () => openSettings(false));
  on("settings", "input", showValues);
  on("key", "change", () => { sessionStorage.setItem("key", byId("key").value); listModels().then(showLanguage); });
  on("model", "change", () => remember({ model: byId("model").value }));
  on("show-tokens", "change", () => { remember({ showTokens: byId("show-tokens").checked }); showTokens(); });
  on("defaults", "click", () => {
    for (const [name, , , , standard] of SLIDERS) byId(name).value = standard;
    byId("seed").value = "";
    showValues();
  });
  for (const mode of document.querySelectorAll("input[name=mode]")) mode.onchange = () => setMode(mode.value);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.isComposing) return;
    hideCandidates();
    if (running) stop();
    else if (byId("settings").contains(document.activeElement)) openSettings(false);
  });
  const point = (event) => { if (event.target.matches(".token")) showCandidates(event.target); };
  transcript.addEventListener("pointerover", (event) => event.pointerType === "mouse" && point(event));
  transcript.addEventListener("pointerout", (event) => event.pointerType === "mouse" && hideCandidates());
  transcript.addEventListener("focusin", point);
  transcript.addEventListener("focusout", hideCandidates);
  transcript.addEventListener("keydown", walk);
  transcript.addEventListener("scroll", noticeScrolling);
  document.addEventListener("click", (event) => (event.target.matches?.(".token") ? point(event) : hideCandidates()));
}

const showTokens = () => transcript.classList.toggle("show-tokens", preferences.showTokens);

byId("system").value = preferences.system;
byId("show-tokens").checked = preferences.showTokens;
byId("key").value = sessionStorage.getItem("key") ?? "";
drawSettings();
showValues();
showTheme();
showTokens();
setMode(preferences.mode);
listen();
listModels();
if (matchMedia("(hover: hover)").matches) byId("message").focus(); // on a phone it would bring up the keyboard
