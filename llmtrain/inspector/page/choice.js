// Part 6: scores become chances and one random number picks. The sliders run llmtrain's own arithmetic (sampling.js).

const DROPPED = ["", "top-k", "top-p", "min-p", "greedy"];
const SLIDERS = [["temperature", 0, 2, 0.01, 2], ["top_k", 0, 100, 1, 0], ["top_p", 0.01, 1, 0.01, 2], ["min_p", 0, 0.5, 0.005, 3]];
const UNDRAWN = 0.5; // stands in where the run was greedy and drew no number
const SMALLEST = 0.006; // of the bar; neighbours below it are drawn as one piece

// What the given settings make of a step: sampling.choose, with ids in place of indices.
function chosenAt(step, settings_) {
  const { logits, ids } = recording.scores(step);
  const result = sampling.choose(logits, settings_, recording.steps[step].uniform ?? UNDRAWN);
  const idOf = (index) => (ids ? ids[index] : index);
  const indexOf = (id) => (ids ? ids.indexOf(id) : id);
  return { ...result, raw: logits, idOf, indexOf, picked: idOf(result.id), first: idOf(result.greedyId) };
}

function sliders(onChange) {
  const shows = [];
  const all = SLIDERS.map(([name, low, high, step, digits]) => {
    const top = name === "top_k" ? Math.min(Math.max(high, recording.sampling[name]), recording.vocabulary) : Math.max(high, recording.sampling[name]);
    const output = h("output", { for: `slider-${name}` });
    const field = h("input", {
      type: "range", id: `slider-${name}`, min: Math.min(low, recording.sampling[name]), max: top, step: "any", "aria-describedby": `help-${name}`,
      input: () => onChange(name, Number((Math.round(field.value / step) * step).toFixed(4))),
      keydown: (event) => { // one tick at a time: `any` lets the run's own value stand as it is
        const by = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 }[event.key];
        if (!by) return;
        event.preventDefault();
        const value = (Math.round(state.sampling[name] / step) + by) * step;
        onChange(name, Number(Math.min(Math.max(value, low), top).toFixed(4)));
      },
    });
    shows.push((now) => {
      field.value = now.sampling[name];
      output.textContent = number.plain(now.sampling[name], digits);
      field.setAttribute("aria-valuetext", output.textContent);
    });
    return h("div", { class: "slider" }, h("div", { class: "top" }, h("label", { for: `slider-${name}` }, name), output), field,
      h("p", { id: `help-${name}` }, say(name)));
  });
  return { element: h("div", { class: "sliders" }, all), show: (now) => shows.forEach((each) => each(now)) };
}

// The chances end to end in the order of ids, with the random number as a mark.
function stackedBar(result, uniform) {
  const segments = [];
  let small = 0;
  const flush = () => {
    if (small > 0) segments.push(h("span", { class: "segment small", style: { width: `${small * 100}%` } }));
    small = 0;
  };
  result.shares.forEach((share, index) => {
    if (share === 0) return;
    if (share < SMALLEST && index !== result.id) { small += share; return; }
    flush();
    const drawn = index === result.id;
    const piece = recording.piece(result.idOf(index));
    segments.push(h("span", {
      class: `segment tint-${segments.length % colours.TINTS}${drawn ? " drawn" : ""}`, style: { width: `${share * 100}%` },
      title: `${piece.label} · ${piece.id} · ${number.percent(share)}`,
    }, share > 0.028 ? shown(piece) : ""));
  });
  flush();
  const at = result.greedy ? null : (100 * result.target) / result.total;
  return h("div", { class: "stacked", role: "img", "aria-label": say("barLabel") },
    at === null ? null : h("span", { class: "says", style: { left: `${Math.min(Math.max(at, 14), 86)}%` } }, say("uniform", number.plain(uniform, 4))),
    h("div", { class: "segments" }, segments),
    at === null ? null : h("span", { class: "pointer", style: { left: `${at}%` } }));
}

function candidateRows(step, result) {
  const run = recording.steps[step];
  const listed = run.candidates.map((each) => each.id);
  for (const id of [result.first, result.picked]) if (!listed.includes(id)) listed.push(id);
  const own = new Map(run.candidates.map((each) => [each.id, each.probability]));
  return listed.map((id) => {
    const index = result.indexOf(id);
    const out = result.dropped[index];
    const share = result.shares[index] ?? 0;
    const badges = [
      id === result.picked && !result.greedy ? h("span", { class: "badge drawn" }, say("drawnIs")) : null,
      id === result.first ? h("span", { class: "badge greedy" }, say("greedyIs")) : null,
      out && !result.greedy ? h("span", { class: "badge" }, say("droppedBy", DROPPED[out])) : null,
      id === run.token ? h("span", { class: "badge" }, say("reached")) : null,
    ];
    return h("tr", { class: `${out ? "out" : ""}${id === result.picked ? " drawn" : ""}`, "data-id": id },
      h("td", { class: "who" }, h("code", null, shown(recording.piece(id)))),
      h("td", { class: "figure extra" }, String(id)),
      h("td", { class: "figure" }, number.plain(result.raw[index], 2)),
      h("td", { class: "figure extra" }, own.has(id) ? number.percent(own.get(id)) : "–"),
      h("td", { class: "wide" }, share > 0 ? h("span", { class: "bar", style: { width: `${share * 100}%` } }) : null),
      h("td", { class: "figure share" }, number.percent(share)),
      h("td", { class: "badges" }, badges));
  });
}

const choicePart = {
  key: "choice",
  build(place) {
    if (!recording.steps.length) {
      place.append(h("p", { class: "note" }, say("noAnswer")));
      return () => {};
    }
    const control = sliders((name, value) => set({ sampling: { ...state.sampling, [name]: value } }));
    const reset = h("button", { id: "as-run", click: () => set({ sampling: { ...recording.sampling } }) }, say("asRun"));
    const same = h("p", { class: "note" });
    const title = h("p", { class: "after" });
    const bar = h("div");
    const body = h("tbody");
    const kept = h("p", { class: "note", id: "kept" });
    const versus = h("div", { class: "versus" });
    const head = [["candidate"], ["id", "figure extra"], ["logit", "figure"], ["own", "figure extra"], ["probability", "", 2], ["", ""]];
    const table = h("table", { class: "candidates" }, h("thead", null, h("tr", null, head.map(([word, kind, span]) =>
      h("th", { scope: "col", class: kind || null, colspan: span ?? null }, word && say(word))))), body);
    const partial = h("p", { class: "note" });
    place.append(h("div", { class: "card stack" }, control.element, h("div", { class: "row" }, reset, same)),
      h("div", { class: "card stack" }, title, h("h3", null, `${say("probability")} · ${say("inOrder")}`), bar, versus),
      h("div", { class: "card stack" }, table, kept, partial,
        recording.penalty === 1 ? null : h("p", { class: "note" }, say("penaltyNote", recording.penalty))));
    return (now, before) => {
      if (before && before.step === now.step && before.sampling === now.sampling) return;
      const step = Math.min(now.step, recording.steps.length - 1);
      const result = chosenAt(step, now.sampling);
      const { uniform } = recording.steps[step];
      const isRun = Object.keys(recording.sampling).every((name) => now.sampling[name] === recording.sampling[name]);
      control.show(now);
      reset.disabled = isRun;
      same.textContent = say(isRun ? "isRun" : "changed");
      const end = recording.promptLength + step;
      title.replaceChildren(h("span", { class: "note" }, `${say("nextAt", step + 1)} `),
        h("span", { class: "context" }, recording.tokens.slice(Math.max(0, end - 12), end).map((token) => shown(token))), h("span", { class: "gap" }, "?"));
      bar.replaceChildren(stackedBar(result, uniform ?? UNDRAWN));
      if (result.greedy) bar.append(h("p", { class: "note" }, say("noDraw")));
      else if (uniform === null) bar.append(h("p", { class: "note" }, say("noUniform")));
      body.replaceChildren(...candidateRows(step, result));
      kept.textContent = say("kept", number.count(result.kept), number.count(recording.vocabulary));
      const rest = recording.scores(step).rest;
      partial.textContent = rest ? say("partialScores", number.count(result.raw.length), number.count(result.raw.length + rest)) : "";
      versus.replaceChildren(...[["drawnIs", result.picked], ["greedyIs", result.first]].map(([word, id]) =>
        h("div", { class: "card", "data-of": word }, h("h3", null, say(word)), h("code", null, shown(recording.piece(id))),
          h("span", { class: "note" }, `${say("id")} ${id} · ${number.percent(result.shares[result.indexOf(id)])}`))));
    };
  },
};
