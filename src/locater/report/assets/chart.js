// A chart as SVG: lines, bands, points and bars on two axes. Colours are attributes, so that a saved file keeps them.

const BOX = { width: 330, height: 215, left: 50, right: 18, top: 12, bottom: 40 };
let clips = 0;

// Round steps for an axis: 1, 2 or 5 times a power of ten, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((times) => times * power >= rough) ?? 10);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
  return found;
}

// An axis: from values to pixels. A logarithmic one shows zero one step left of one, marked as such by its tick.
function axis(range, pixels, options = {}) {
  const log = options.factors ? Math.log10 : options.log ? (value) => Math.log2(value + 1) : (value) => value;
  const [low, high] = [log(range[0]), log(range[1])];
  const width = high - low || 1;
  const place = (value) => pixels[0] + ((log(value) - low) / width) * (pixels[1] - pixels[0]);
  let marks = options.ticks ?? ticks(range[0], range[1], options.count ?? 5);
  if (options.log && !options.ticks) marks = [0, 1, 4, 16, 64, 256, 1024, 4096, 16384].filter((value) => value <= range[1]);
  if (options.factors) marks = powers(range);
  if (options.whole) marks = marks.filter(Number.isInteger);
  return { place, marks, label: options.label ?? "", name: options.name ?? tickName };
}

// Powers of ten within a range, or its ends where there are too few.
function powers([low, high]) {
  const found = [];
  for (let power = Math.ceil(Math.log10(low) - 1e-9); 10 ** power <= high * (1 + 1e-9); power++) found.push(10 ** power);
  return found.length > 1 ? found : [low, high];
}

// Short enough for the margin: 45k, not 45000.
function tickName(value) {
  return Math.abs(value) >= 1e4 && Math.abs(value) < 1e6 ? `${shownNumber(value / 1000)}k` : shownNumber(value);
}

function spanOf(series, part, given) {
  if (given) return given;
  // A band belongs to the range: cut off, an interval would look like certainty or like none.
  const parts = part === 0 ? [0] : [1, 2, 3];
  const values = series.flatMap((one) => one.points.flatMap((point) => parts.map((each) => point[each]))).filter(Number.isFinite);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  if (!(high > low)) return [low - 1 || -1, low + 1 || 1];
  const margin = (high - low) * 0.05;
  return part === 0 ? [low, high] : [low - margin, high + margin];
}

// `series`: {points: [[x, y, low?, high?]], label, kind: "line" | "points" | "bars", look: {colour, dash}}.
function chart(title, series, options = {}) {
  const box = { ...BOX, ...options.box };
  const range = spanOf(series, 1, options.y?.range);
  box.left = Math.max(box.left, 26 + 7.5 * Math.max(...axis(range, [0, 1], options.y).marks.map((mark) => tickName(mark).length)));
  const x = axis(spanOf(series, 0, options.x?.range), [box.left, box.width - box.right], options.x);
  const y = axis(range, [box.height - box.bottom, box.top], options.y);
  const element = svg("svg", { viewBox: `0 0 ${box.width} ${box.height}`, class: "chart", role: "img", "font-size": 12.5,
    "font-family": "system-ui, sans-serif", "aria-label": `${title}. ${inWords(series)}` });
  element.append(svg("rect", { width: box.width, height: box.height, fill: look("panel") }));
  drawAxes(element, x, y, box);
  options.under?.(element, x, y, box);
  const clip = `clip-${++clips}`; // what lies beyond the range must not run into the words around
  element.append(svg("clipPath", { id: clip }, svg("rect", { x: box.left, y: box.top - 4, width: box.width - box.left - box.right + 2, height: box.height - box.top - box.bottom + 6 })));
  const inside = svg("g", { "clip-path": `url(#${clip})` });
  series.forEach((one) => drawSeries(inside, one, x, y));
  element.append(inside);
  options.over?.(element, x, y, box);
  followPointer(element, series, x, y, box);
  return element;
}

// The nearest point under the pointer, ringed, with its numbers in words.
function followPointer(element, series, x, y, box) {
  const points = series.flatMap((one) => one.points.filter((point) => Number.isFinite(point[1])).map((point) => ({ one, point, at: [x.place(point[0]), y.place(point[1])] })));
  const clear = () => element.querySelectorAll(".here").forEach((mark) => mark.remove());
  element.addEventListener("pointerleave", clear);
  element.addEventListener("pointermove", (event) => {
    clear();
    const frame = element.getBoundingClientRect();
    const [px, py] = [event.clientX - frame.left, event.clientY - frame.top].map((part) => (part * box.width) / frame.width);
    const away = ({ at }) => Math.hypot(at[0] - px, at[1] - py);
    const nearest = points.reduce((best, one) => (best && away(best) <= away(one) ? best : one), null);
    if (!nearest || away(nearest) > 40) return;
    const { one, point, at } = nearest;
    const words = [one.name ?? "", `${x.name(point[0])}: ${shownNumber(point[1])}`].filter(Boolean).join(", ");
    const left = at[0] > box.width / 2;
    element.append(svg("circle", { class: "here", cx: at[0], cy: at[1], r: 5, fill: "none", stroke: look("focus"), "stroke-width": 2 }),
      text(words, at[0] + (left ? -8 : 8), Math.max(14, at[1] - 9), { class: "here", "text-anchor": left ? "end" : "start", fill: look("ink"), stroke: look("panel"), "stroke-width": 4, "paint-order": "stroke" }));
  });
}

function drawAxes(element, x, y, box) {
  const [soft, line] = [look("soft"), look("line")];
  for (const value of y.marks) {
    element.append(svg("line", { x1: box.left, x2: box.width - box.right, y1: y.place(value), y2: y.place(value), stroke: line }));
    element.append(text(tickName(value), box.left - 6, y.place(value) + 4, { "text-anchor": "end", fill: soft }));
  }
  for (const value of x.marks) {
    element.append(svg("line", { x1: x.place(value), x2: x.place(value), y1: box.height - box.bottom, y2: box.height - box.bottom + 4, stroke: soft }));
    // About 3.3 is half a letter: a model's name at the right end would be cut.
    const beyond = x.place(value) + 3.3 * x.name(value).length > box.width;
    const [at, anchor] = beyond ? [box.width - 1, "end"] : [x.place(value), "middle"];
    element.append(text(x.name(value), at, box.height - box.bottom + 16, { "text-anchor": anchor, fill: soft }));
  }
  const most = Math.floor((box.width - box.left + box.right) / 7.4);
  element.append(text(x.label.length > most ? `${x.label.slice(0, most - 1)}…` : x.label, (box.left + box.width - box.right) / 2, box.height - 6, { "text-anchor": "middle", fill: look("ink") }));
  const turned = { "text-anchor": "middle", fill: look("ink"), transform: `rotate(-90 12 ${(box.top + box.height - box.bottom) / 2})` };
  element.append(text(y.label, 12, (box.top + box.height - box.bottom) / 2, turned));
}

function drawSeries(element, one, x, y) {
  const points = one.points.filter((point) => Number.isFinite(point[1]));
  const at = (point, part) => `${x.place(point[0]).toFixed(2)},${y.place(point[part]).toFixed(2)}`;
  if (points.length && points[0].length === 4) {
    const edge = [...points.map((point) => at(point, 3)), ...points.toReversed().map((point) => at(point, 2))];
    element.append(svg("polygon", { points: edge.join(" "), fill: one.look.colour, "fill-opacity": 0.18, "data-name": one.name ?? "" }));
  }
  if (one.kind === "points") {
    for (const point of points) element.append(svg("circle", { cx: x.place(point[0]), cy: y.place(point[1]), r: one.radius ?? 3,
      fill: one.look.colour, "fill-opacity": 0.65, stroke: one.look.colour, "stroke-width": 0.6 }));
  } else {
    element.append(svg("polyline", { "data-name": one.name ?? "", points: points.map((point) => at(point, 1)).join(" "), fill: "none", stroke: one.look.colour,
      "stroke-width": 2, "stroke-dasharray": one.look.dash ?? "", "stroke-linejoin": "round" }));
  }
}

// What a screen reader hears instead of the lines: first, last and extremes of each.
function inWords(series) {
  return series.map((one) => {
    const label = one.label ?? one.name;
    const values = one.points.map((point) => point[1]).filter(Number.isFinite);
    if (!values.length) return `${label}: no values.`;
    const numbers = [values[0], values.at(-1), Math.min(...values), Math.max(...values)].map(shownNumber);
    return `${label}: from ${numbers[0]} to ${numbers[1]}, lowest ${numbers[2]}, highest ${numbers[3]}.`;
  }).join(" ");
}

// The names of the lines, each with its stroke, under a chart.
function keyOf(series) {
  const list = html("span", { class: "group" });
  for (const one of series.filter((one) => one.label)) {
    const stroke = svg("svg", { width: 22, height: 10, "aria-hidden": "true" }, one.kind === "points"
      ? svg("circle", { cx: 11, cy: 5, r: 4, fill: one.look.colour })
      : svg("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: one.look.colour, "stroke-width": 3, "stroke-dasharray": one.look.dash ?? "" }));
    list.append(html("span", {}, stroke, ` ${one.label}`));
  }
  return list;
}

// A chart with its caption and the key of its lines.
function figure(title, series, options) {
  if (series.every((one) => one.kind !== "points" && finite(one).length < 2)) return html("figure", {}, html("h3", {}, title), html("p", { class: "note" }, onePoint(series, options)));
  const drawn = chart(title, series, options);
  const key = options?.key ? keyOf(series) : "";
  return offer(html("figure", {}, html("h3", {}, title), drawn, html("figcaption", {}, key)), title, () => drawn);
}

function finite(one) {
  return one.points.filter((point) => Number.isFinite(point[1]));
}

// Lines that have no length, in words: an empty frame would look like a fault.
function onePoint(series, options) {
  const found = series.flatMap((one) => finite(one).map((point) => `${one.label ?? one.name}: ${shownNumber(point[1])}`));
  return found.length ? `Only one point, no curve (${options?.x?.label ?? "x"}: ${shownNumber(series.flatMap(finite)[0][0])}). ${found.join("; ")}.` : "No values.";
}

function onto(places, values) {
  return places.map((place, n) => [place, values[n]]);
}
