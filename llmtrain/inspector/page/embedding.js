// Part 2: the row of the table, the rows that point the same way, and whether the output layer shares the table.

// Figures as stripes: negative ones blue, positive ones orange, 0 the ground, so sign and size can both be seen.
function stripes(values, label) {
  const most = Math.max(...values.map(Math.abs), 1e-12);
  const drawn = canvas(values.length, 1, label, { class: "stripes" });
  const context = drawn.getContext("2d");
  const image = context.createImageData(values.length, 1);
  const dark = settings.dark();
  const ground = dark ? [38, 42, 48] : [250, 248, 244];
  values.forEach((value, index) => {
    const share = Math.sqrt(Math.abs(value) / most);
    const end = value < 0 ? (dark ? [120, 180, 240] : [22, 82, 140]) : (dark ? [245, 170, 90] : [190, 92, 10]);
    image.data.set([...ground.map((from, channel) => from + (end[channel] - from) * share), 255], 4 * index);
  });
  context.putImageData(image, 0, 0);
  return drawn;
}

const embeddingPart = {
  key: "embedding",
  build(place) {
    const { embedding } = recording;
    const row = h("div", { class: "card stack" });
    const near = h("div", { class: "card stack" });
    place.append(h("div", { class: "two" }, row, near));
    return (now, before) => {
      const token = recording.tokens[now.at];
      if (before && recording.tokens[before.at].id === token.id) return;
      const found = embedding.of(token.id);
      if (!found) {
        row.replaceChildren(h("p", { class: "note" }, say("notRecorded")));
        near.replaceChildren();
        return;
      }
      const most = Math.max(...found.row.map(Math.abs));
      row.replaceChildren(
        h("h3", null, say("rowOf", number.count(token.id), number.count(embedding.rows), number.count(embedding.width))),
        h("div", { class: "row" }, h("span", { class: `quote tint-${now.at % colours.TINTS}` }, shown(token)), h("span", { class: "note" }, `→ [${[...found.row.slice(0, 4)].map((each) => number.plain(each, 3)).join(", ")}, …]`)),
        stripes([...found.row], say("rowLabel")),
        h("p", { class: "legend" }, h("span", { class: "swatch low" }), number.plain(-most, 2), h("span", { class: "swatch zero" }), "0",
          h("span", { class: "swatch high" }), number.plain(most, 2), h("span", { class: "push" }, `${say("norm")} ${number.plain(found.norm, 2)}`)),
        h("p", { class: "note tied" }, say(embedding.tied ? "tied" : "untied")));
      near.replaceChildren(h("h3", null, `${say("neighbours")} · ${say("cosine")}`),
        h("div", { class: "bars" }, found.neighbours.map(({ id, cosine }) => [
          h("span", { class: "name" }, shown(recording.piece(id))),
          h("span", { class: "bar", style: { width: `${Math.max(0, cosine) * 100}%` } }),
          h("span", { class: "value" }, number.plain(cosine, 3)),
        ])));
    };
  },
};
