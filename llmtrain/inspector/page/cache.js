// Part 5: what reading the prompt took, what each token keeps, and what that saves, as measured on this machine.

const cachePart = {
  key: "cache",
  build(place) {
    const { cache, model, measured, readLength, promptLength } = recording;
    const held = h("dd");
    const when = h("dt");
    const saved = model.heads > model.kv_heads ? say("mhaWould", number.bytes((cache.bytes_per_token * model.heads) / model.kv_heads)) : "";
    place.append(h("dl", { class: "card facts three" },
      h("div", null, h("dt", null, say("ttft")), h("dd", null, number.ms(cache.ttft_seconds))),
      h("div", null, h("dt", null, say("perToken")), h("dd", null, number.bytes(cache.bytes_per_token))),
      h("div", null, when, held),
      h("div", { class: "wide" }, h("dt", null, `${say("perToken")} =`),
        h("dd", { class: "formula" }, say("cacheFormula", model.layers, model.kv_heads, model.head_dim,
          cache.bytes_per_token / (2 * model.layers * model.kv_heads * model.head_dim))), h("dd", { class: "note" }, saved))));
    const charts = h("div", { class: "two charts" });
    place.append(charts);
    const inMs = (values) => values.map(([x, seconds]) => [x, seconds * 1000]);
    const ms = (value) => (value < 10 && value % 1 ? number.plain(value, 1) : String(Math.round(value)));
    const growth = h("div", { class: "card stack" }, h("h3", null, say("growth")));
    const chartCard = (word, drawn) => h("div", { class: "card stack" }, h("h3", null, say(word)), drawn);
    if (measured.length > 1) {
      const line = (key) => inMs(measured.map((each) => [each.tokens, each[key]]));
      charts.append(
        chartCard("timeAgainst", chart.lines(
          [{ points: line("without_cache"), name: say("withoutCache"), second: true }, { points: line("with_cache"), name: say("withCache") }],
          { x: say("length"), y: "ms", label: say("timeAgainst"), format: ms })),
        chartCard("ttftAgainst", chart.lines([{ points: line("ttft_seconds") }], { x: say("promptLength"), y: "ms", label: say("ttftAgainst"), format: ms })));
    } else {
      charts.append(h("p", { class: "note" }, say("noTimes")));
    }
    charts.append(growth);
    const points = Array.from({ length: readLength + 1 }, (_, tokens) => [tokens, (tokens * cache.bytes_per_token) / 1024]);
    const stepTimes = recording.steps.slice(1).map((step) => [step.position, step.seconds * 1000]);
    if (stepTimes.length > 1) {
      charts.append(chartCard("stepTimes", chart.lines([{ points: stepTimes, dots: stepTimes.length < 80 }],
        { x: say("length"), y: "ms", label: say("stepTimes"), format: ms })));
    }
    return (now, before) => {
      if (before && before.step === now.step) return;
      const tokens = Math.min(promptLength + now.step, readLength);
      when.textContent = `${say("inAll")} (${say("afterStep", number.count(tokens))})`;
      held.textContent = number.bytes(tokens * cache.bytes_per_token);
      growth.replaceChildren(growth.firstChild, chart.lines(
        [{ points: points.slice(0, tokens + 1), area: true, dots: false, name: number.bytes(tokens * cache.bytes_per_token) },
          { points: points.slice(tokens), dots: false, second: true }].filter((each) => each.points.length > 1),
        { x: say("length"), y: "KiB", label: say("growth"), format: ms, now: promptLength }));
    };
  },
};
