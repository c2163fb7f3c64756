// Part 8: the final norm and output layer applied to what each layer has so far, for the token looked at.

const layersPart = {
  key: "layers",
  build(place) {
    const { lens } = recording;
    const title = h("h3");
    const table = h("div", { class: "sideways", tabindex: 0, role: "group", "aria-label": say("layers") });
    place.append(h("div", { class: "card stack" }, title, table, scaleLegend("probability"),
      h("p", { class: "note" }, h("span", { class: "ring" }), ` ${say("actual")}`)));
    return (now, before) => {
      if (before && before.at === now.at) return;
      title.textContent = say("layersAt", recording.tokens[now.at].label, now.at);
      const rows = lens.at(now.at);
      if (!rows) {
        table.replaceChildren(h("p", { class: "note" }, say("notRecorded")));
        return;
      }
      const next = recording.tokens[now.at + 1]?.id;
      const columns = rows[0].top.length;
      table.replaceChildren(h("table", { class: "ladder" },
        h("thead", null, h("tr", null, h("th"), Array.from({ length: columns }, (_, index) => h("th", { scope: "col" }, `${index + 1}.`)),
          next === undefined ? null : h("th", { scope: "col" }, say("actual")))),
        h("tbody", null, rows.map((row, index) => h("tr", null,
          h("th", { scope: "row" }, index ? say("afterLayer", index) : say("beforeLayers")),
          row.top.map(({ id, probability }) => cell(id, probability, id === next)),
          next === undefined ? null : h("td", { class: "plain" }, h("code", null, shown(recording.piece(next))),
            h("small", null, `${number.percent(row.next.probability)} · ${say("rank")} ${number.count(row.next.rank)}`)))))));
    };
  },
};

function cell(id, probability, isNext) {
  const share = Math.sqrt(probability); // small chances differ visibly too
  return h("td", { class: isNext ? "hit-final" : null, style: { background: colours.css(share), color: colours.ink(share) } },
    h("code", null, shown(recording.piece(id))), h("small", null, number.percent(probability)));
}

// The scale with its two ends; colours stand for the square root of a share.
function scaleLegend(word) {
  const drawn = canvas(64, 1, say("scale"), null);
  const context = drawn.getContext("2d");
  const image = context.createImageData(64, 1);
  for (let index = 0; index < 64; index += 1) image.data.set([...colours.rgb(index / 63), 255], 4 * index);
  context.putImageData(image, 0, 0);
  return h("p", { class: "legend" }, `${say(word)} 0`, drawn, "1");
}
