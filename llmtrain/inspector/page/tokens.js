// Part 1, and tokens wherever they stand on the page: a button each, tinted in turn, signs for what has no letter.

const SIGNS = { "\n": "↵", "\r": "␍", "\t": "⇥", "\u00a0": "⍽" };
const UNSEEN = /([\x00-\x1f\x7f\u00a0\u200b\u200c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff])/u;

// A token's text as nodes. Control characters become signs; bytes that are no whole character stand as hex digits.
function shown(token) {
  if (token.special) return [h("span", { class: "sign" }, token.text || `#${token.id}`)];
  if (token.text === null) return [h("span", { class: "sign" }, token.bytes.map(hex).join(" "))];
  // A joiner inside an emoji does its work; alone it would not be seen.
  const parts = token.text === "\u200d" ? [token.text] : token.text.split(UNSEEN).filter(Boolean);
  return parts.map((part) => {
    if (part in SIGNS) return h("span", { class: "sign" }, SIGNS[part]);
    if (part === "\u200d" || UNSEEN.test(part)) {
      return h("span", { class: "sign" }, `U+${part.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`);
    }
    return part;
  });
}

// All tokens of the run as buttons in a place. Gives `show(state)` and `at(index)`.
function tokenButtons(place, name) {
  const { tokens, promptLength } = recording;
  const buttons = tokens.map((token, index) => {
    const button = h("button", {
      class: `token tint-${index % colours.TINTS}${index >= promptLength ? " answer" : ""}`,
      type: "button", tabindex: -1, "data-index": index, "aria-label": `${index}: ${token.label}`,
    }, shown(token));
    if (token.text?.endsWith("\n") && name !== "strip") return [button, h("br")];
    return button;
  });
  place.append(...buttons.flat());
  const list = buttons.map((each) => (Array.isArray(each) ? each[0] : each));
  const look = (index) => {
    stopPlaying();
    const step = Math.max(state.step, index - promptLength + 1); // what is not yet written gets written
    set({ at: index, step });
  };
  place.addEventListener("click", (event) => {
    const index = event.target.closest(".token")?.dataset.index;
    if (index !== undefined) look(Number(index));
  });
  place.addEventListener("keydown", (event) => {
    if (!event.target.closest(".token")) return;
    arrows(event, list.length, state.at, (index) => { look(index); list[index].focus({ preventScroll: true }); });
  });
  let current = null;
  let end = null;
  return {
    list,
    at: (index) => list[index],
    show(now) {
      const written = promptLength + now.step;
      if (end !== written) {
        list.forEach((button, index) => {
          button.classList.toggle("later", index >= written);
          button.classList.toggle("next", index === written);
        });
        end = written;
      }
      if (current !== null) {
        list[current].classList.remove("at");
        list[current].tabIndex = -1;
      }
      current = now.at;
      list[current].classList.add("at");
      list[current].tabIndex = 0;
      if (place.scrollHeight > place.clientHeight + 4 && place.clientHeight) keepInView(place, list[current]);
    },
  };
}

function keepInView(scroller, element) {
  const [outer, inner] = [scroller.getBoundingClientRect(), element.getBoundingClientRect()];
  if (inner.top >= outer.top && inner.bottom <= outer.bottom) return;
  scroller.scrollBy({ top: (inner.top + inner.bottom - outer.top - outer.bottom) / 2, behavior: "instant" });
}

// ---- The part ----

const tokensPart = {
  key: "tokens",
  build(place) {
    const { tokens } = recording;
    const text = h("div", { class: "text card", role: "group", "aria-label": say("promptAndAnswer") });
    const buttons = tokenButtons(text, "tokens");
    const detail = h("div", { class: "card stack token-detail" });
    const bytes = tokens.reduce((sum, token) => sum + token.bytes.length, 0);
    const characters = [...recording.text].length;
    place.append(text,
      h("p", { class: "note" }, say("tokensCount", number.count(tokens.length), number.count(characters), number.count(bytes),
        number.plain(characters / tokens.length, 2))),
      h("div", { class: "two" }, detail, lookup()));
    return (now) => {
      buttons.show(now);
      const token = tokens[now.at];
      detail.className = `card stack token-detail tint-${now.at % colours.TINTS}`;
      detail.replaceChildren(h("div", { class: "detail" },
        h("div", { class: "big" }, shown(token)),
        h("dl", { class: "facts" },
          fact("at", String(now.at)), fact("id", String(token.id)),
          fact("characters", token.special ? "–" : String(token.characters)),
          h("div", null, h("dt", null, say("bytes")),
            h("dd", { class: "small" }, token.bytes.length ? token.bytes.map((each) => h("span", { class: "byte" }, hex(each))) : "–")))),
      ...[partNote(token)].flat());
    };
  },
};

const fact = (word, value) => h("div", null, h("dt", null, say(word)), h("dd", null, value));

function partNote(token) {
  if (token.special) return h("p", { class: "note" }, say("special"));
  return token.parts.map(({ character, first, last: end, of }) => h("p", { class: "note" }, character === null
    ? say("loneByte") : say("partOf", first === end ? first : `${first}–${end}`, of, character)));
}

// From id to piece and from piece to id, over all pieces that the recording names.
function lookup() {
  const hits = h("div", { class: "hits", role: "status" });
  const known = recording.pieces();
  const find = (asked) => {
    if (!asked) return [];
    const exact = known.filter((piece) => String(piece.id) === asked.trim() || piece.text === asked);
    const holding = known.filter((piece) => !exact.includes(piece) && piece.text?.includes(asked));
    return [...exact, ...holding.sort((one, other) => one.text.length - other.text.length)].slice(0, 12);
  };
  const example = recording.tokens.find((token) => token.text?.trim() && !token.special)?.text ?? "a";
  const field = h("input", {
    type: "search", id: "lookup", placeholder: say("lookupHint", example), autocomplete: "off", spellcheck: "false",
    input: () => {
      const found = find(field.value);
      hits.replaceChildren(...(found.length || !field.value
        ? found.map((piece) => h("span", { class: "hit" }, h("code", null, shown(piece)), h("span", null, `${piece.id}`)))
        : [h("span", { class: "note" }, say("nothingFound"))]));
    },
  });
  const whole = known.length >= recording.vocabulary;
  return h("div", { class: "card stack" }, h("h3", null, h("label", { for: "lookup" }, say("lookup"))), field, hits,
    h("p", { class: "note" }, say(whole ? "lookupAll" : "lookupScope", number.count(known.length))));
}
