// The chat page: sends what is written to the server that the page came from, shows the answer as it comes, and what the
// model thought of each of its tokens. It knows the shape of the API and nothing of the engine, and keeps no conversation.
// Whatever a server or a person wrote reaches the page as `textContent`, never as HTML.
"use strict";

// ---- Words, English and Chinese ----

const WORDS = {
  model: ["Model", "模型"], adapter: ["adapter", "适配器"], newChat: ["New chat", "新对话"],
  language: ["切换到中文", "Switch to English"], otherLanguage: ["中", "EN"], theme: ["Light or dark", "浅色或深色"],
  settings: ["Settings", "设置"], close: ["Close", "关闭"], transcript: ["Conversation", "对话"], mode: ["Mode", "方式"],
  chat: ["Chat", "对话"], continueText: ["Continue text", "续写"], send: ["Send", "发送"], stop: ["Stop", "停止"],
  message: ["Message", "消息"], messageHint: ["Write a message", "写一条消息"], textHint: ["Begin a text", "写个开头"],
  keys: ["Enter sends, Shift+Enter breaks the line", "Enter 发送，Shift+Enter 换行"],
  welcomeChat: ["What would you like to ask?", "想问点什么？"],
  welcomeChatText: ["Point at any word of an answer to see how likely it was and what else the model considered.",
    "指向回答中的任意一处，可以看到它的概率，以及模型还考虑过什么。"],
  welcomeText: ["How does the text begin?", "文章如何开头？"],
  welcomeTextText: ["A model that was never taught to chat only continues what it reads. Point at any word that it adds to see what else it considered.",
    "没有学过对话的模型，只会接着读到的文字往下写。指向它写出的任意一处，可以看到它还考虑过什么。"],
  edit: ["Edit", "修改"], retry: ["Retry", "重试"], goOn: ["Go on", "接着写"],
  first: ["first token {0} ms", "首个词元 {0} 毫秒"], speed: ["{0} tokens/s", "{0} 词元/秒"],
  tokens: ["{0} tokens", "{0} 个词元"], prompt: ["prompt {0}", "提示 {0}"], cached: ["prompt {0}, {1} reused", "提示 {0}，复用 {1}"],
  ended_stop: ["ended by itself", "自行结束"], ended_length: ["cut off at its limit", "达到长度上限"],
  ended_stopped: ["stopped by you", "已由你停止"],
  writing: ["The model is writing.", "模型正在写。"],
  noServer: ["The server cannot be reached: is it still running?", "连接不上服务器：它还在运行吗？"],
  cut: ["The connection ended before the answer did.", "回答还没写完，连接就断了。"],
  notOurs: ["The server answered with status {0} and no explanation.", "服务器返回状态 {0}，没有说明原因。"],
  busy: ["{0} Try again in {1} s.", "{0} 请在 {1} 秒后重试。"],
  needKey: ["This server asks for an API key: enter it in the settings.", "此服务器需要 API 密钥：请在设置中填写。"],
  key: ["API key", "API 密钥"], keyHelp: ["Kept until this tab is closed.", "仅保存到此标签页关闭为止。"],
  system: ["System message", "系统消息"], systemHint: ["none", "无"],
  systemHelp: ["Stands before the conversation and sets the tone.", "放在对话之前，定下基调。"],
  showTokens: ["Show tokens", "显示词元"],
  showTokensHelp: ["Marks where each token begins; the deeper its colour, the less likely it was.", "标出每个词元的起点；颜色越深，当时的概率越低。"],
  defaults: ["Back to the defaults", "恢复默认值"], fresh: ["fresh", "随机"],
  ofModel: ["What the model thought, before temperature and filters.", "模型自己的概率，未经温度和筛选。"],
  ofBytes: ["One character, written in {0} tokens:", "一个字符，由 {0} 个词元写成："],
};

// Name, lowest, highest, step, default, explanation. The names are the API's and stand on the page as they are.
const SLIDERS = [
  ["temperature", 0, 2, 0.05, 0.8, "Higher is bolder; 0 always takes the most likely token.", "越高越大胆；0 总取最可能的词元。"],
  ["top_p", 0.05, 1, 0.05, 1, "Keeps the likeliest tokens up to this total; 1 keeps all.", "只保留概率之和达到此值的词元；1 为全部保留。"],
  ["top_k", 0, 200, 1, 0, "Keeps this many of the likeliest tokens; 0 keeps all.", "只保留最可能的这么多个词元；0 为全部保留。"],
  ["min_p", 0, 0.5, 0.01, 0, "Drops tokens below this share of the likeliest; 0 keeps all.", "去掉不及最可能者此比例的词元；0 为全部保留。"],
  ["repetition_penalty", 1, 2, 0.05, 1, "Above 1, what was already written becomes less likely.", "大于 1 时，已写过的词元更难再现。"],
  ["max_tokens", 1, 1000, 1, 200, "The answer ends here at the latest.", "回答最多这么长。"],
  ["candidates", 1, 20, 1, 5, "How many candidates are kept for each token.", "每个词元保留多少个候选。"],
];
const SEED_HELP = ["The same number gives the same text; empty draws a fresh one.", "同一数字得到同一文字；留空则每次随机。"];
const EXAMPLES = { chat: ["Hello!", "你好"], continue: ["话说天下大势，", "却说曹操", "In the beginning"] };

// ---- What is remembered, and small tools ----

const byId = (id) => document.getElementById(id);
const remembered = JSON.parse(localStorage.getItem("llmtrain") ?? "{}");
const preferences = {
  language: remembered.language ?? (navigator.language.startsWith("zh") ? "zh" : "en"),
  theme: remembered.theme ?? null, // null follows the system
  mode: remembered.mode ?? "chat",
  model: remembered.model ?? null,
  showTokens: remembered.showTokens ?? false,
  system: remembered.system ?? "",
  sampling: remembered.sampling ?? {},
};

function remember(changes) {
  Object.assign(preferences, changes);
  localStorage.setItem("llmtrain", JSON.stringify(preferences));
}

const pick = (english, chinese) => (preferences.language === "zh" ? chinese : english);
const say = (word, ...values) => pick(...WORDS[word]).replace(/\{(\d)\}/g, (_, number) => values[number]);

/** An element with properties and children; strings among the children become text, whatever they contain. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// ---- The server ----

/** A failure that the page can show: one sentence. */
class Refusal extends Error {}

async function call(path, options = {}) {
  const key = sessionStorage.getItem("key");
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Refusal(say("noServer"));
  });
  if (response.ok) return response;
  if (response.status === 401) {
    byId("key-field").hidden = false;
    throw new Refusal(say("needKey"));
  }
  const body = await response.json().catch(() => null);
  const sentence = sentenceOf(body?.error) ?? say("notOurs", response.status);
  const wait = response.headers.get("Retry-After");
  throw new Refusal(wait ? say("busy", sentence, wait) : sentence);
}

/** The API's error as one sentence, or nothing where there is none. */
function sentenceOf(error) {
  const text = String(error?.message ?? "").trim();
  return text ? text[0].toUpperCase() + text.slice(1) + (/[.!?。！？]$/.test(text) ? "" : ".") : undefined;
}

/** The JSON documents of a stream of server-sent events, until `[DONE]`. */
async function* documents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Refusal(say("cut"));
    });
    if (done) throw new Refusal(say("cut"));
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.filter((each) => each.startsWith("data:"))) {
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const document = JSON.parse(data);
      if (document.error) throw new Refusal(sentenceOf(document.error) ?? say("cut"));
      yield document;
    }
  }
}

/** The tokens of one choice as `{token, bytes, logprob, candidates}`: chats and completions write them differently. */
function tokensOf({ logprobs }) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((each) => ({ ...readToken(each), candidates: (each.top_logprobs ?? []).map(readToken) }));
  }
  return (logprobs.tokens ?? []).map((token, number) => ({
    ...readToken({ token, logprob: logprobs.token_logprobs[number] }),
    candidates: Object.entries(logprobs.top_logprobs?.[number] ?? {}).map(([name, logprob]) => readToken({ token: name, logprob })),
  }));
}

/** Completions write half a character as `bytes:\xe4\xb8`; chats give the bytes themselves. */
function readToken({ token, logprob, bytes }) {
  const escaped = /^bytes:((?:\\x[0-9a-f]{2})+)$/i.exec(token);
  if (!bytes && escaped) bytes = escaped[1].split("\\x").slice(1).map((hex) => parseInt(hex, 16));
  return { token, logprob, bytes: Uint8Array.from(bytes ?? new TextEncoder().encode(token)) };
}

// ---- From tokens to what is seen ----

/** Whether bytes end inside a character of UTF-8: its first byte says how many there should be. */
function endsInsideCharacter(bytes) {
  for (let back = 1; back <= Math.min(3, bytes.length); back++) {
    const byte = bytes[bytes.length - back];
    if (byte >= 0xc0) return back < (byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2);
    if (byte < 0x80) return false;
  }
  return false;
}

/**
 * The text of one answer, in pieces that can be pointed at. A piece is one token, or the tokens that together write one
 * character. The server's text decides what is shown; the tokens only say where it is divided. So nothing appears of a
 * stop string; a token without text (the end of an answer, a role marker) becomes a small sign.
 */
class AnswerText {
  constructor(element) {
    this.element = element;
    this.rest = element.appendChild(document.createTextNode("")); // text whose tokens are unknown
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    this.text = "";
    this.shown = 0; // characters of the text that stand in pieces
    this.open = null; // the piece whose character is incomplete
    this.waiting = []; // whole pieces whose text the server still holds back
  }

  add(text, tokens) {
    this.text += text;
    for (const token of tokens) {
      const continues = token.bytes[0] >= 0x80 && token.bytes[0] < 0xc0;
      if (this.open && !continues) this.close(); // its character will never be whole
      this.open ??= { tokens: [], text: "" };
      this.open.tokens.push(token);
      this.open.text += this.decoder.decode(token.bytes, { stream: true });
      if (!endsInsideCharacter(this.open.tokens.flatMap((each) => [...each.bytes]))) this.close();
    }
    this.paint(false);
  }

  finish() {
    if (this.open) this.close();
    this.paint(true);
  }

  close() {
    this.open.text += this.decoder.decode(); // U+FFFD for what is incomplete, as the server has it
    this.waiting.push(this.open);
    this.open = null;
  }

  paint(finished) {
    while (this.waiting.length) {
      const piece = this.waiting[0];
      const text = this.text.slice(this.shown, this.shown + piece.text.length);
      if (!finished && text.length < piece.text.length && piece.text.startsWith(text)) break;
      this.place(piece, piece.text.startsWith(text) ? text : "");
      this.waiting.shift();
    }
    this.rest.data = this.text.slice(this.shown);
  }

  place(piece, text) {
    const span = make("span", { className: "token", tabIndex: this.element.querySelector(".token") ? -1 : 0 });
    span.textContent = text || piece.tokens.map(nameOf).join("");
    span.classList.toggle("mark", !text);
    span.classList.toggle("break", text.includes("\n"));
    // From 0 for a certain token to 1 for one in ten thousand, by orders of magnitude: small models are seldom sure.
    span.style.setProperty("--doubt", Math.min(1, -Math.min(...piece.tokens.map((token) => token.logprob)) / Math.log(1e4)));
    span.tokens = piece.tokens;
    this.rest.before(span);
    this.shown += text.length;
  }
}

const chance = (token) => Math.exp(token.logprob);

/** A token's name where it stands alone: white space made visible, half a character as its bytes. */
function nameOf({ token, bytes }) {
  try {
    token = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes) || token;
  } catch {
    return [...bytes].map((byte) => byte.toString(16).toUpperCase().padStart(2, "0")).join(" ");
  }
  return token.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", "␍") || "∅";
}

function percent(probability) {
  if (probability < 0.0005) return "< 0.1 %";
  return `${(100 * probability).toFixed(1)} %`;
}

// ---- The candidates of the token that is pointed at ----

const popup = byId("considered");
let pointed = null;

function showCandidates(span) {
  hideCandidates();
  pointed = span;
  span.classList.add("pointed");
  span.setAttribute("aria-describedby", "considered");
  const several = span.tokens.length > 1;
  popup.replaceChildren(
    ...(several ? [make("p", {}, say("ofBytes", span.tokens.length))] : []),
    ...span.tokens.flatMap((token) => candidateList(token, several ? 3 : 20)),
    make("p", {}, say("ofModel")),
  );
  popup.hidden = false;
  const place = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = popup;
  const above = place.top - height - 8;
  const top = above > 8 ? above : Math.min(place.bottom + 8, innerHeight - height - 8);
  popup.style.left = `${Math.max(12, Math.min(place.left + place.width / 2 - width / 2, innerWidth - width - 12))}px`;
  popup.style.top = `${Math.max(8, top)}px`;
}

/** A heading and the bars of one token; the token itself is named even if it was not among the likeliest. */
function candidateList(token, most) {
  const same = (other) => other.token === token.token && String(other.bytes) === String(token.bytes);
  const rows = [...token.candidates].sort((one, other) => other.logprob - one.logprob).slice(0, most);
  if (!rows.some(same)) rows.push(token);
  const item = (row) => {
    const bar = make("i");
    bar.style.width = `${100 * chance(row)}%`;
    return make("li", { className: same(row) ? "chosen" : "" },
      make("span", {}, same(row) ? "✓" : ""), make("span", { className: "name" }, nameOf(row)),
      make("span", { className: "bar" }, bar), make("span", { className: "share" }, percent(chance(row))));
  };
  const heading = make("h3", {}, make("span", {}, nameOf(token)), make("span", { className: "share" }, percent(chance(token))));
  return [heading, make("ol", {}, ...rows.map(item))];
}

function hideCandidates() {
  pointed?.classList.remove("pointed");
  pointed?.removeAttribute("aria-describedby");
  pointed = null;
  popup.hidden = true;
}

/** The arrow keys walk along an answer; all its tokens together are one stop of the Tab key. */
function walk(event) {
  const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
  if (!event.target.matches(".token") || !(event.key in steps)) return;
  event.preventDefault();
  const all = [...event.target.parentElement.querySelectorAll(".token")];
  const next = all[Math.max(0, Math.min(all.length - 1, all.indexOf(event.target) + steps[event.key]))];
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

// ---- The conversation ----

const transcript = byId("transcript");
let exchanges = []; // {mode, prompt, answer: AnswerText, element, figures, ended, error}
let running = null; // {exchange, controller} while an answer comes
let frame = 0; // of the browser, in which to scroll

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
  const request = requestFor(exchange, exchanges);
  draw(exchange);
  exchanges.push(exchange);
  running = { exchange, controller: new AbortController() };
  announce(say("writing"));
  showState();
  transcript.scrollTop = transcript.scrollHeight;
  try {
    await receive(exchange, request, running.controller.signal);
  } catch (error) {
    if (error.name === "AbortError") exchange.ended = "stopped";
    else if (error instanceof Refusal) exchange.error = error.message;
    else throw error;
  } finally {
    exchange.answer.finish();
    if (running?.exchange === exchange) running = null;
    announce(exchange.error ?? exchange.answer.text);
    showState();
    follow();
  }
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
  if (exchange.mode === "continue" && exchange.answer.text) {
    actions.push(button("goOn", () => {
      remove(exchange);
      ask(exchange.prompt + exchange.answer.text, "continue");
    }));
  }
  return make("span", { className: "actions" }, ...actions);
}

function remove(exchange) {
  hideCandidates();
  exchange.element.remove();
  exchanges = exchanges.filter((each) => each !== exchange);
  showState();
}

/** Keeps the newest line in sight while the answer grows, unless the reader has scrolled away; once for each frame. */
function follow() {
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(() => {
    if (transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight < 150) transcript.scrollTop = transcript.scrollHeight;
  });
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
    const value = remembered.sampling?.[name] ?? standard;
    return make("div", { className: "field" },
      make("div", { className: "row" }, make("label", { htmlFor: name }, name), make("output", { htmlFor: name })),
      make("input", { type: "range", id: name, min, max, step, value }), make("p", { help }));
  });
  const seed = make("input", { id: "seed", inputMode: "numeric", pattern: "[0-9]{1,15}", value: remembered.sampling?.seed ?? "" });
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
    const { data } = await (await call("v1/models")).json();
    const name = (model) => (model.parent ? `${model.id} (${say("adapter")})` : model.id);
    byId("model").replaceChildren(...data.map((model) => make("option", { value: model.id }, name(model))));
    if (data.some((model) => model.id === preferences.model)) byId("model").value = preferences.model;
    byId("max_tokens").max = Math.min(1000, ...data.map((model) => model.max_model_len ?? 1000)); // more would be refused
    showValues();
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    announce(error.message);
    byId("welcome-text").textContent = error.message;
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
  transcript.addEventListener("scroll", hideCandidates);
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
