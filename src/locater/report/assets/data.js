// The data of the page: one compressed block of JSON and columns, read once.

const KINDS = { f8: Float64Array, f4: Float32Array, i2: Int16Array, u2: Uint16Array, u1: Uint8Array };
const WORD_NONE = 255;

async function readData() {
  const text = document.getElementById("data").textContent.trim();
  const packed = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const data = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  data.at = (place) => new KINDS[place.kind](buffer, 8 + length + place.at, place.count);
  data.views?.forEach((view) => unpack(view, data.at));
  return data;
}

// Columns become functions of frame and head; lines and eigenvalues are taken out when a head is looked at.
function unpack(view, at) {
  for (const name of ["block", "layer", "head", "regime", "does"]) view[name] = at(view[name]);
  view.count = view.head.length;
  for (const name of Object.keys(view.columns)) view.columns[name] = at(view.columns[name]);
  view.value = (name, frame, head) => view.columns[name][frame * view.count + head];
  // Words of a head, the most telling first: a bit for each thing that it does, or the number of its regime.
  view.wordsOf = (kind, frame, head) => {
    const code = view[kind][frame * view.count + head];
    if (kind === "does") return Array.from({ length: 16 }, (_, bit) => bit).filter((bit) => code & (1 << bit));
    return code === WORD_NONE ? [] : [code];
  };
  view.wordOf = (kind, frame, head) => view.wordsOf(kind, frame, head)[0] ?? WORD_NONE;
  view.has = (kind) => view[kind].some((code) => code !== (kind === "does" ? 0 : WORD_NONE));
  view.title = (head) => `${view.blocks[view.block[head]]} ${view.layer[head]}.${view.head[head]}`;
  view.line = (group, name, head) => scaledRow(view[group]?.[name], view.count, head, at);
  // Heads may have fewer eigenvalues than the widest, or none.
  view.spectrum = (head) => {
    const count = view.eigenvalues ? at(view.eigenvalues.counts)[head] : 0;
    return count ? scaledRow(view.eigenvalues, view.count, head, at).slice(0, 2 * count) : null;
  };
}

function scaledRow(lines, count, head, at) {
  if (!lines) return null;
  const values = at(lines.values);
  const each = values.length / count;
  const unit = at(lines.units)[head];
  if (Number.isNaN(unit)) return null; // this head has none
  return Array.from(values.subarray(head * each, (head + 1) * each), (value) => value * unit);
}

// The range of a quantity over all views and frames, without the outermost hundredth: one odd head must not grey the rest.
function rangeOf(views, quantity, difference) {
  const values = [];
  for (const view of views) {
    if (!view.columns[quantity.name] || (difference && view.frames.length < 2)) continue;
    for (let frame = 0; frame < view.frames.length; frame++)
      for (let head = 0; head < view.count; head++) {
        const value = view.value(quantity.name, frame, head) - (difference ? view.value(quantity.name, 0, head) : 0);
        if (Number.isFinite(value)) values.push(value);
      }
  }
  values.sort((a, b) => a - b);
  if (quantity.scale === "share" && !difference) return { low: 0, high: 1, values };
  let low = quantile(values, 0.01);
  let high = quantile(values, 0.99);
  if (difference || quantity.scale === "diverging") {
    high = Math.max(Math.abs(low), Math.abs(high)) || 1;
    low = -high;
  }
  return high > low ? { low, high, values } : { low: low - 1, high: low + 1, values };
}

function quantile(sorted, share) {
  if (!sorted.length) return 0;
  const place = share * (sorted.length - 1);
  const below = Math.floor(place);
  const above = Math.min(below + 1, sorted.length - 1);
  return sorted[below] + (place - below) * (sorted[above] - sorted[below]);
}

// A quantity's number at the decimals that a terminal gives it; of a share that is nearly none or all, the bound.
function numberOf({ scale, digits }, value) {
  const decimals = Number(/^\.(\d)f$/.exec(digits)?.[1] ?? NaN);
  if (!Number.isFinite(value) || Number.isNaN(decimals)) return shownNumber(value);
  const least = 10 ** -decimals;
  if (scale === "share" && value > 0 && value < least) return `<${least}`;
  if (scale === "share" && value < 1 && value > 1 - least) return `>${(1 - least).toFixed(decimals)}`;
  return value.toFixed(decimals).replace("-", "−");
}

// Three significant digits.
function shownNumber(value) {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-4) return value.toExponential(2).replace("-", "−").replace("e+", "e");
  return String(Number(value.toPrecision(3))).replace("-", "−");
}
