// One answer: its text in pieces that can be pointed at, and what is shown of a piece. Whatever a server or a person wrote
// becomes `textContent`, never HTML.

import { say } from "./words.js";

/** An element with properties and children; strings among the children become text, whatever they contain. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
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
export class AnswerText {
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

// ---- The candidates of the piece that is pointed at ----

const popup = document.getElementById("considered");
let pointed = null;

export function showCandidates(span) {
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

export function hideCandidates() {
  pointed?.classList.remove("pointed");
  pointed?.removeAttribute("aria-describedby");
  pointed = null;
  popup.hidden = true;
}

/** The arrow keys walk along an answer; all its tokens together are one stop of the Tab key. */
export function walk(event) {
  const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
  if (!event.target.matches(".token") || !(event.key in steps)) return;
  event.preventDefault();
  const all = [...event.target.parentElement.querySelectorAll(".token")];
  const next = all[Math.max(0, Math.min(all.length - 1, all.indexOf(event.target) + steps[event.key]))];
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}
