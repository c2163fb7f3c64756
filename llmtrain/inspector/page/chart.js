// A chart of lines over one number: axes from round numbers, each line named at its end, every text selectable.

const chart = (() => {
  // About `wanted` round numbers from 0 or below the lowest to above the highest.
  function ticks(lowest, highest, wanted = 4) {
    if (highest === lowest) highest = lowest + 1;
    const rough = (highest - lowest) / wanted;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
    const first = Math.floor(lowest / step + 1e-9);
    const last = Math.ceil(highest / step - 1e-9);
    return Array.from({ length: last - first + 1 }, (_, index) => Number(((first + index) * step).toPrecision(12)));
  }

  const width_ = () => (innerWidth < 600 ? 350 : 480); // texts keep their size on a phone
  const HEIGHT = 250;
  const EDGES = { left: 58, right: 14, top: 26, bottom: 42 };

  // lines: [{points: [[x, y], …], name, second, area, dots}]; now: an x to mark; fromZero: the y axis begins at 0.
  function lines(series, { x: xName, y: yName, format = String, label, now = null, fromZero = true, width = width_(), height = HEIGHT }) {
    const all = series.flatMap((each) => each.points);
    const [xs, ys] = [0, 1].map((index) => all.map((point) => point[index]));
    const xTicks = ticks(Math.min(...xs), Math.max(...xs), 5).filter(Number.isInteger);
    const yTicks = ticks(fromZero ? Math.min(0, ...ys) : Math.min(...ys), Math.max(...ys, fromZero ? 1e-12 : -Infinity));
    const [xLow, xHigh] = [Math.min(...xs), Math.max(...xs, Math.min(...xs) + 1)];
    const [yLow, yHigh] = [yTicks[0], yTicks[yTicks.length - 1]];
    const across = (value) => EDGES.left + ((value - xLow) / (xHigh - xLow)) * (width - EDGES.left - EDGES.right);
    const up = (value) => height - EDGES.bottom - ((value - yLow) / (yHigh - yLow)) * (height - EDGES.top - EDGES.bottom);
    const path = (points) => points.map(([x, y], index) => `${index ? "L" : "M"}${across(x).toFixed(1)} ${up(y).toFixed(1)}`).join("");
    const base = up(Math.max(yLow, 0));
    const svg = s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
    for (const each of yTicks) {
      svg.append(
        s("line", { class: each === 0 ? "axis" : "grid", x1: EDGES.left, x2: width - EDGES.right, y1: up(each), y2: up(each) }),
        s("text", { x: EDGES.left - 8, y: up(each) + 4, "text-anchor": "end" }, format(each)),
      );
    }
    for (const each of xTicks.filter((value) => value >= xLow && value <= xHigh)) {
      svg.append(s("text", { x: across(each), y: height - EDGES.bottom + 17, "text-anchor": "middle" }, String(each).replace("-", "−")));
    }
    svg.append(
      s("text", { x: EDGES.left - 8, y: 12, "text-anchor": "start", class: "axis-name", dx: -46 }, yName),
      s("text", { x: width - EDGES.right, y: height - 6, "text-anchor": "end", class: "axis-name" }, xName),
    );
    if (now !== null && now >= xLow && now <= xHigh) {
      svg.append(s("line", { class: "now", x1: across(now), x2: across(now), y1: EDGES.top, y2: height - EDGES.bottom }));
    }
    series.forEach(({ points, name, second, area, dots }) => {
      if (!points.length) return;
      const kind = second ? " second" : "";
      const [lastX, lastY] = points[points.length - 1];
      if (area) svg.append(s("path", { class: "area", d: `${path(points)}L${across(lastX)} ${base}L${across(points[0][0])} ${base}Z` }));
      svg.append(s("path", { class: `line${kind}`, d: path(points) }));
      if (dots ?? points.length < 24) {
        for (const [x, y] of points) {
          svg.append(s("circle", { class: `dot${kind}`, cx: across(x), cy: up(y), r: 3.4 }, s("title", null, `${x}: ${format(y)}`)));
        }
      }
      if (name) svg.append(s("text", { class: `label${kind}`, x: across(lastX) - 2, y: Math.max(up(lastY) - 10, EDGES.top + 2), "text-anchor": "end" }, name));
    });
    return svg;
  }

  return { lines, ticks };
})();
