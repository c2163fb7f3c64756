// Part 4: every head of every layer as a small triangle, one of them large, and its weights over the text.

const SMALL = 48; // figures per side of a small triangle at most; more are pooled by their largest
const LABELLED = 44; // tokens that can be named along the diagonal

const strength = (weight) => Math.sqrt(weight); // so that a tenth can be told from nothing

function thumbnail(head, count, label) {
  const side = Math.max(1, Math.min(count, SMALL));
  const drawn = canvas(side, side, label, null);
  const context = drawn.getContext("2d");
  const image = context.createImageData(side, side);
  const pooled = new Float32Array(side * side);
  for (let from = 0; from < count; from += 1) {
    const y = Math.floor((from * side) / count);
    head.row(from).forEach((weight, to) => {
      const place = y * side + Math.floor((to * side) / count);
      if (weight > pooled[place]) pooled[place] = weight;
    });
  }
  for (let y = 0; y < side; y += 1) {
    for (let x = 0; x <= y; x += 1) image.data.set([...colours.rgb(strength(pooled[y * side + x])), 255], 4 * (y * side + x));
  }
  context.putImageData(image, 0, 0);
  return drawn;
}

// Layers down, heads across, heads that share keys and values under one bracket.
function headPicker(place) {
  const { layers, count, perKv } = recording.heads;
  const heads = layers[0].length;
  const most = Math.log2(Math.max(2, count));
  const grid = h("div", { class: "picker", role: "group", "aria-label": `${say("layer")}, ${say("head")}` });
  grid.style.gridTemplateColumns = `auto repeat(${heads}, auto)`;
  grid.append(h("span"));
  for (let kv = 0; kv * perKv < heads; kv += 1) grid.append(h("span", { class: "kv", style: { "grid-column": `span ${perKv}` } }, `KV ${kv + 1}`));
  const buttons = layers.map((all, layer) => {
    grid.append(h("span", { class: "name" }, say("layerN", layer + 1)));
    return all.map((head, index) => {
      const bits = head.entropy / Math.LN2;
      const label = `${say("layerN", layer + 1)}, ${say("headN", index + 1)}, ${say("entropyBits", number.plain(bits, 2))}`;
      const button = h("button", { title: label, "aria-label": label, tabindex: -1, click: () => set({ layer, head: index }) },
        thumbnail(head, count, label), h("span", { class: "mean", style: { width: `${(100 * bits) / most}%` } }));
      grid.append(button);
      return button;
    });
  });
  grid.addEventListener("keydown", (event) => {
    const vertical = event.key === "ArrowUp" || event.key === "ArrowDown";
    const choose = (index) => {
      set(vertical ? { layer: index } : { head: index });
      buttons[state.layer][state.head].focus();
    };
    arrows(event, vertical ? layers.length : heads, vertical ? state.layer : state.head, choose);
  });
  place.append(grid, h("p", { class: "legend" }, h("span", { class: "swatch mean" }), say("entropySay", number.plain(most, 1))));
  return (now) => buttons.forEach((row, layer) => row.forEach((button, head) => {
    const chosen = layer === now.layer && head === now.head;
    button.setAttribute("aria-pressed", String(chosen));
    button.tabIndex = chosen ? 0 : -1;
  }));
}

// The head to begin with: the one that looks hardest at something other than itself and the beginning.
function tellingHead() {
  const { layers, count } = recording.heads;
  let best = { layer: 0, head: 0 };
  let most = -1;
  layers.forEach((heads, layer) => heads.forEach((head, index) => {
    let sum = 0;
    for (let from = 2; from < Math.min(count, 64); from += 1) sum += Math.max(...head.row(from).subarray(1, from));
    if (sum > most) [best, most] = [{ layer, head: index }, sum];
  }));
  return best;
}

// The triangle of one head. `show(head, size, written, row)`: size tokens a side, rows from `written` on still empty.
function matrixView(peek) {
  const drawn = canvas(1, 1, "", null);
  const over = s("svg", { "aria-hidden": "true" });
  const frame = h("div", { class: "matrix" }, drawn, over);
  let size = 1;
  const placeOf = (event) => {
    const box = drawn.getBoundingClientRect();
    return [event.clientY - box.top, event.clientX - box.left].map((each) => Math.floor((each / box.width) * size));
  };
  drawn.addEventListener("pointermove", (event) => peek(...placeOf(event), false));
  drawn.addEventListener("pointerleave", () => peek(null, null, false));
  drawn.addEventListener("click", (event) => peek(...placeOf(event), true));

  function paint(head, written) {
    const cell = Math.max(1, Math.min(40, Math.floor(1100 / size)));
    const gap = cell >= 12 ? 1 : 0;
    drawn.width = drawn.height = size * cell;
    const context = drawn.getContext("2d");
    const dark = settings.dark();
    context.fillStyle = dark ? "#24282d" : "#f6f3ed";
    context.fillRect(0, 0, drawn.width, drawn.height);
    for (let from = 0; from < written; from += 1) {
      head.row(from).forEach((weight, to) => {
        context.fillStyle = colours.css(strength(weight));
        context.fillRect(to * cell, from * cell, cell - gap, cell - gap);
      });
    }
  }

  function label(row, written) {
    const unit = 100 / size;
    over.setAttribute("viewBox", "0 0 100 100");
    const { first } = recording.heads;
    const pixels = 100 / (drawn.clientWidth || 500); // of the view box
    const font = Math.min(17 * pixels, unit * 0.82);
    const all = size <= LABELLED && font >= 9.5 * pixels;
    const names = [];
    for (let index = 0; index < written; index += 1) {
      if (!all && index !== row) continue;
      names.push(s("text", {
        x: (index + 1) * unit + 0.8, y: (index + 0.5) * unit, "dominant-baseline": "central", "font-size": all ? font : 14 * pixels,
        class: index === row ? "lit-name" : null,
      }, recording.tokens[first + index].label.slice(0, 14)));
    }
    over.replaceChildren(...names);
    if (row !== null && row >= 0 && row < size) {
      over.append(s("rect", { class: "lit", x: 0, y: row * unit, width: (row + 1) * unit, height: unit, "vector-effect": "non-scaling-stroke" }));
    }
  }

  let painted = "";
  return {
    frame,
    show(now, total, written, row) {
      const { layers } = recording.heads;
      size = total;
      const key = [now.layer, now.head, total, written].join();
      if (painted !== key) paint(layers[now.layer][now.head], written);
      painted = key;
      drawn.setAttribute("aria-label", say("matrixLabel", now.layer + 1, now.head + 1, written));
      label(row, written);
    },
  };
}

// The text with the weights of one token as colour, and its strongest looks as arcs.
function textView(place, peek) {
  const arcs = s("svg", { "aria-hidden": "true" });
  const text = h("div", { class: "text", role: "group", "aria-label": say("looks", "") }, arcs);
  const buttons = tokenButtons(text, "attention");
  const index = (event) => event.target.closest(".token")?.dataset.index;
  text.addEventListener("pointerover", (event) => { if (index(event) !== undefined) peek(Number(index(event))); });
  text.addEventListener("pointerleave", () => peek(null));
  text.addEventListener("focusin", (event) => { if (index(event) !== undefined && event.target.matches(":focus-visible")) peek(Number(index(event))); });
  text.addEventListener("focusout", () => peek(null));
  place.append(h("div", { class: "arcs" }, text));

  function arc(from, to, weight) {
    const frame = text.getBoundingClientRect();
    const [a, b] = [from, to].map((each) => each.getBoundingClientRect());
    const x = (box) => box.left + box.width / 2 - frame.left + text.scrollLeft;
    const y = (box) => box.top - frame.top + text.scrollTop + 2;
    const lift = Math.min(30, 12 + Math.abs(x(a) - x(b)) * 0.07);
    return s("path", {
      d: `M${x(a)} ${y(a)}C${x(a)} ${y(a) - lift} ${x(b)} ${y(b) - lift} ${x(b)} ${y(b)}`,
      "stroke-width": (1 + 2.5 * weight).toFixed(2), "stroke-opacity": Math.min(1, 0.3 + weight).toFixed(2),
    });
  }

  return (now, position, row) => {
    buttons.show(now);
    const { first } = recording.heads;
    buttons.list.forEach((button, at) => {
      const weight = row?.[at - first];
      button.classList.toggle("weighted", weight !== undefined);
      button.classList.toggle("source", at === position);
      button.title = weight === undefined ? "" : number.percent(weight);
      if (weight === undefined) return;
      button.style.setProperty("--weight", colours.css(strength(weight)));
      button.style.setProperty("--weight-ink", colours.ink(strength(weight)));
    });
    const strongest = [...(row ?? [])].map((weight, at) => [weight, at + first])
      .filter(([weight, at]) => weight > 0.03 && at !== position).sort((one, other) => other[0] - one[0]).slice(0, 8);
    arcs.replaceChildren(...strongest.map(([weight, at]) => arc(buttons.list[position], buttons.list[at], weight)));
  };
}

const attentionPart = {
  key: "attention",
  build(place) {
    const { layers, first, count, perKv } = recording.heads;
    if (!layers.length || count < 1) {
      place.append(h("p", { class: "note" }, say("notRecorded")));
      return () => {};
    }
    let peeked = null; // a row of the window while it is pointed at
    let column = null;
    const reading = h("p", { class: "reading", "aria-live": "off" });
    const title = h("h3");
    const shared = h("p", { class: "note" });
    const pick = h("div", { class: "stack" });
    const matrix = matrixView((row, over, press) => {
      const written = Math.min(count, last() + 1 - first);
      if (row !== null && (row < 0 || row >= written)) row = null;
      if (press && row !== null) { peeked = null; stopPlaying(); set({ at: first + row, step: state.step }); return; }
      peeked = row;
      column = row !== null && over >= 0 && over <= row ? over : null;
      render();
    });
    const overText = h("div", { class: "card stack" });
    const showText = textView(overText, (position) => {
      const row = position === null ? null : position - first;
      peeked = row !== null && row >= 0 && row < Math.min(count, last() + 1 - first) ? row : null;
      column = null;
      render();
    });
    const showPicker = headPicker(pick);
    overText.prepend(reading);
    place.append(h("div", { class: "card heads" }, pick,
      h("div", { class: "stack" }, title, matrix.frame, h("div", { class: "row" }, scaleLegend("scale"), h("span", { class: "note" }, `↓ ${say("rows")} · → ${say("columns")}`)), shared)),
    overText);
    if (first > 0) place.append(h("p", { class: "note" }, say("windowed", first)));

    function render() {
      const head = layers[state.layer][state.head];
      const written = Math.max(1, Math.min(count, last() + 1 - first));
      const size = Math.min(count, Math.ceil(written / 8) * 8);
      const row = peeked ?? state.at - first;
      const there = row >= 0 && row < count;
      title.textContent = `${say("layerN", state.layer + 1)} · ${say("headN", state.head + 1)} · KV ${head.kv + 1}`;
      shared.textContent = perKv > 1 ? say("group", perKv, head.kv + 1) : say("groupNone");
      matrix.show(state, size, written, there ? row : null);
      showText(state, first + row, there ? head.row(row) : null);
      reading.replaceChildren(...(there ? described(head, row, column) : [say(row < 0 ? "notRecorded" : "notRead")]));
    }
    addEventListener("resize", () => place.isConnected && render());
    return () => { peeked = null; column = null; showPicker(state); render(); };
  },
};

// What one token looks at, in words: its strongest looks, or the one pointed at.
function described(head, row, column) {
  const { first } = recording.heads;
  const token = (index) => h("code", { class: "quote" }, shown(recording.tokens[first + index]));
  const weights = head.row(row);
  const best = column !== null ? [column]
    : [...weights.keys()].sort((one, other) => weights[other] - weights[one]).slice(0, 3).filter((index) => weights[index] > 0.01);
  const before = head.before(row) > 0.005 ? [" · ", say("earlier"), " ", number.percent(head.before(row))] : [];
  return [h("b", null, token(row)), ` ${say("lookingAt")} `,
    ...best.flatMap((index, place) => [place ? " · " : "", token(index), ` ${number.percent(weights[index])}`]), ...before,
    h("span", { class: "push note" }, say("entropyBits", number.plain(head.entropyOf(row) / Math.LN2, 2)))];
}
