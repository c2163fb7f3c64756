// Part 3: the angles (or waves) of a position, from the model's own tables, and what is left of them at a distance.

const MOST_WHEELS = 16;

// A pair of figures turned: its hand, and what it has swept of the current turn.
function wheel(cosine, sine, frequency, position, index) {
  const full = (frequency * position) / (2 * Math.PI);
  const [x, y] = [24 + 19 * cosine, 24 - 19 * sine];
  const part = full - Math.floor(full);
  const swept = position === 0 || part < 1e-4 ? null
    : s("path", { class: "swept", d: `M24 24L43 24A19 19 0 ${part > 0.5 ? 1 : 0} 0 ${x.toFixed(2)} ${y.toFixed(2)}Z` });
  const period = (2 * Math.PI) / frequency;
  const every = period >= 1000 ? number.count(Math.round(period)) : number.plain(period, period < 10 ? 1 : 0);
  return h("div", { class: "wheel", title: `${say("pair", index + 1)}: ${say("turns", every)}` },
    s("svg", { viewBox: "0 0 48 48", role: "img", "aria-label": `${say("pair", index + 1)}: ${Math.round(part * 360)}°` },
      s("circle", { cx: 24, cy: 24, r: 19 }), swept,
      s("line", { class: "hand", x1: 24, y1: 24, x2: x, y2: y }), s("circle", { class: "tip", cx: x, cy: y, r: 3.2 })),
    h("span", null, `1 / ${every}`));
}

function rotaryPicture(place) {
  const { frequencies, cos, sin, first } = recording.position;
  const pairs = frequencies.length;
  const chosen = Array.from({ length: Math.min(pairs, MOST_WHEELS) }, (_, index) =>
    Math.round((index * (pairs - 1)) / Math.max(1, Math.min(pairs, MOST_WHEELS) - 1)));
  const title = h("h3");
  const wheels = h("div", { class: "wheels" });
  place.append(title, wheels, h("p", { class: "note" }, `${say("circles")} · 1 / n: ${say("turns", "n")}`));
  return (now) => {
    title.textContent = say("positionAt", now.at);
    const row = now.at - first;
    if (row < 0 || row * pairs >= cos.length) return wheels.replaceChildren(h("p", { class: "note" }, say("notRecorded")));
    const length = Math.hypot(cos[row * pairs], sin[row * pairs]) || 1; // YaRN scales both
    return wheels.replaceChildren(...chosen.map((pair) =>
      wheel(cos[row * pairs + pair] / length, sin[row * pairs + pair] / length, frequencies[pair], now.at, pair)));
  };
}

function wavePicture(place) {
  const { vectors, width, count, first } = recording.position;
  const label = say("waves");
  const drawn = canvas(width, count, label, { class: "waves" });
  const context = drawn.getContext("2d");
  const image = context.createImageData(width, count);
  const most = vectors.reduce((top, value) => Math.max(top, Math.abs(value)), 1e-12);
  vectors.forEach((value, index) => image.data.set([...colours.rgb(0.5 + value / most / 2), 255], 4 * index));
  context.putImageData(image, 0, 0);
  const mark = s("rect", { class: "lit", x: 0, width, height: 1 });
  const over = s("svg", { viewBox: `0 0 ${width} ${count}`, preserveAspectRatio: "none", "aria-hidden": "true" }, mark);
  const title = h("h3");
  place.append(title, h("div", { class: "matrix waves-frame" }, drawn, over), h("p", { class: "note" }, `${say("dimension")} 0–${width - 1} → · ${say("at")} ${first}–${first + count - 1} ↓`));
  return (now) => {
    title.textContent = `${label} · ${say("positionAt", now.at)}`;
    mark.setAttribute("y", now.at - first);
  };
}

const positionPart = {
  key: "position",
  sentence: () => `positionSay_${recording.position.kind}`,
  build(place) {
    const { kind, distance } = recording.position;
    const picture = h("div", { class: "card stack" });
    const show = kind === "sinusoidal" ? wavePicture(picture) : rotaryPicture(picture);
    const curves = distance.products.map((values, index) => ({
      points: [...values].map((value, at) => [at, value]), dots: false, second: index > 0 && index === distance.products.length - 1,
    }));
    const name = say(kind === "sinusoidal" ? "byDistanceWave" : "byDistance");
    place.append(h("div", { class: "two" }, picture, h("div", { class: "card stack" }, h("h3", null, name),
      chart.lines(curves, { x: say("distance"), y: say("dot"), label: name, format: (value) => number.plain(value, 1), fromZero: false }),
      h("p", { class: "note" }, say("sameCurve", distance.products.length, number.plain(distance.largestDifference, 6))))));
    return show;
  },
};
