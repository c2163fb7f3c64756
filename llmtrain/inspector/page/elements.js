// Elements and numbers. Every text goes in as a text node, so what a prompt or a token says is shown and never read as
// HTML. Styles are set as properties, never as attributes: the page's policy refuses those.

const SVG = "http://www.w3.org/2000/svg";

// fill(make, attributes, ...children): functions as listeners, `style` as an object, null and false left out.
function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") made.addEventListener(name, value);
    else if (name === "style") for (const [property, each] of Object.entries(value)) made.style.setProperty(property, each);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function icon(path, filled = false) {
  return s("svg", { class: filled ? "icon filled" : "icon", viewBox: "0 0 24 24", "aria-hidden": "true" }, s("path", { d: path }));
}

// The label of a canvas is its only text for a screen reader.
function canvas(width, height, label, attributes) {
  const made = h("canvas", { role: "img", "aria-label": label, ...attributes });
  made.width = width;
  made.height = height;
  return made;
}

// Keys that move inside a group of buttons of which one is chosen: left and up, right and down, home and end.
function arrows(event, count, current, choose) {
  const to = {
    ArrowLeft: current - 1, ArrowUp: current - 1, ArrowRight: current + 1, ArrowDown: current + 1, Home: 0, End: count - 1,
  }[event.key];
  if (to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  event.stopPropagation();
  choose(Math.min(Math.max(to, 0), count - 1));
}

const hex = (byte) => byte.toString(16).toUpperCase().padStart(2, "0");

// ---- Numbers ----

const number = {
  plain: (value, digits = 3) => {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    if (value !== 0 && Math.abs(value) < 10 ** -digits) return value.toExponential(1).replace("-", "−");
    return value.toFixed(digits).replace("-", "−");
  },
  count: (value) => value.toLocaleString(say("locale")),
  percent: (share) => {
    const value = share * 100;
    if (value === 0) return "0 %";
    if (value < 0.1) return value < 0.001 ? "< 0.001 %" : `${value.toFixed(3)} %`;
    return `${value.toFixed(value < 10 ? 1 : value > 99.9 && value < 100 ? 2 : 0)} %`;
  },
  bytes: (value) => {
    const units = ["B", "KiB", "MiB", "GiB"];
    let unit = 0;
    while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
    return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
  },
  ms: (seconds) => {
    const value = seconds * 1000;
    return `${value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : Math.round(value)} ms`;
  },
};
