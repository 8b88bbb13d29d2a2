// The toy head: three moments from the sliders, and what follows from them by closed form, exactly, and by simulation.

const PAIRS = 32;

// tr W, tr W² and ‖W‖² in units of λ. The scale is η² = deviation² + (tr W)²/d, split by the symmetry tr W²/‖W‖².
function toyMoments(knobs) {
  const trace = knobs.trace / knobs.temperature;
  const eta2 = (knobs.deviation / knobs.temperature) ** 2 + trace ** 2 / knobs.width;
  const norm = (3 * eta2) / (knobs.symmetry + 2);
  return { trace, norm, square: knobs.symmetry * norm };
}

// The closed form with rotary positions for W = (mI + noise) turned by R_Δ, 64 wide; the noise has no symmetry.
// Equal to theory/rotary.py with core mI, query Gram (‖W‖²/64) I and key Gram I.
function rotaryForm(moments, length, base, positions) {
  const rate = moments.trace / (2 * PAIRS);
  const strength = moments.norm / (2 * PAIRS);
  const sums = positions.map(() => ({ mean: 0, norm: 0, square: 0 }));
  for (let pair = 0; pair < PAIRS; pair++) addPair(sums, base ** (-pair / PAIRS), { rate, strength }, length, positions);
  return sums.map(({ mean, norm, square }) => between(-1, length - 1, mean, length * norm + square));
}

function addPair(sums, frequency, { rate, strength }, length, positions) {
  const until = [new Float64Array(length + 1), new Float64Array(length + 1)];
  const suffix = [0, 0];
  let squares = 0;
  const tails = [new Float64Array(length + 2), new Float64Array(length + 2)];
  for (let t = length; t >= 1; t--) {
    suffix[0] += Math.cos(frequency * (length - t)) / length;
    suffix[1] += Math.sin(frequency * (length - t)) / length;
    [tails[0][t], tails[1][t]] = suffix;
    squares += suffix[0] ** 2 + suffix[1] ** 2;
  }
  for (let t = 1; t <= length; t++) for (const part of [0, 1]) until[part][t] = until[part][t - 1] + tails[part][t];
  positions.forEach((t, n) => {
    const here = [Math.cos(frequency * (length - t)), Math.sin(frequency * (length - t))];
    const total = [t * here[0] - until[0][length], t * here[1] - until[1][length]];
    sums[n].mean += 2 * rate * total[0];
    sums[n].norm += 2 * strength * (here[0] * (t * here[0] - 2 * until[0][t]) + here[1] * (t * here[1] - 2 * until[1][t]) + squares);
    sums[n].square += 2 * rate ** 2 * (total[0] ** 2 - total[1] ** 2);
  });
}

// The exact ρ from the grid, linear between its points; null where the grid does not reach.
function gridProfile(grid, values, knobs) {
  const length = grid.lengths.indexOf(knobs.length);
  if (length < 0 || knobs.symmetry !== 1 || knobs.base || knobs.width !== grid.width) return null;
  const [x, y] = [placeIn(grid.traces, knobs.trace / knobs.temperature, Math.asinh, grid.bend), placeIn(grid.deviations, knobs.deviation / knobs.temperature, Math.log, 1)];
  if (!x || !y) return null;
  const [columns, rows, points] = [grid.traces.length, grid.deviations.length, grid.positions];
  const at = (row, column, point) => values[((length * rows + row) * columns + column) * points + point] / 65535;
  return Array.from({ length: points }, (_, point) => {
    const [low, high] = [0, 1].map((step) => at(y.below + step, x.below, point) * (1 - x.share) + at(y.below + step, x.below + 1, point) * x.share);
    return low * (1 - y.share) + high * y.share;
  });
}

function placeIn(edges, value, bend, unit) {
  const slack = 1e-9 * (edges.at(-1) - edges[0]); // a slider at its end may round beyond it
  if (!(value >= edges[0] - slack && value <= edges.at(-1) + slack)) return null;
  const below = Math.max(0, Math.min(edges.findLastIndex((edge) => edge <= value), edges.length - 2));
  const [low, high, here] = [edges[below], edges[below + 1], value].map((one) => bend(one / unit));
  return { below, share: (here - low) / (high - low) };
}

// Numbers that are the same on every machine: a small generator (Park and Miller), made normal by Box and Muller.
function normalNumbers(count) {
  let state = 20240202;
  const uniform = () => (state = (state * 48271) % 2147483647) / 2147483647;
  return Float64Array.from({ length: count }, () => Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform()));
}

const WALKS = { count: 48, width: 8, tokens: 48 };
let walkNumbers = null;

// True softmax attention of the last token over random walks, its mean and its mean entropy over log T, for eigenvalues mean + deviation·z, symmetric.
function softmaxOverWalks(knobs) {
  const { count, width, tokens } = WALKS;
  walkNumbers ??= normalNumbers(count * tokens * width);
  const spread = normalQuantiles(width);
  const [mean, deviation] = [knobs.trace / knobs.temperature / width, knobs.deviation / knobs.temperature / Math.sqrt(width)];
  const attention = new Float64Array(tokens);
  let entropy = 0;
  for (let walk = 0; walk < count; walk++) {
    const place = new Float64Array(tokens * width);
    for (let t = 0; t < tokens; t++)
      for (let n = 0; n < width; n++) place[t * width + n] = (t ? place[(t - 1) * width + n] : 0) + walkNumbers[(walk * tokens + t) * width + n];
    const logits = Array.from({ length: tokens }, (_, t) => {
      let sum = 0;
      for (let n = 0; n < width; n++) sum += (mean + deviation * spread[n]) * place[t * width + n] * place[(tokens - 1) * width + n];
      return sum;
    });
    const most = Math.max(...logits);
    const weights = logits.map((logit) => Math.exp(logit - most));
    const total = weights.reduce((sum, weight) => sum + weight, 0);
    weights.forEach((weight, t) => {
      const share = weight / total;
      attention[t] += share / count;
      entropy -= share > 0 ? (share * Math.log(share)) / count / Math.log(tokens) : 0;
    });
  }
  return { attention: Array.from(attention), entropy };
}

// Evenly filled normal values with mean 0 and deviation 1.
function normalQuantiles(count) {
  const found = Array.from({ length: count }, (_, n) => inverseNormal((n + 0.5) / count));
  const scale = Math.sqrt(found.reduce((sum, value) => sum + value ** 2, 0) / count);
  return found.map((value) => value / scale);
}

function inverseNormal(share) {
  let [low, high] = [-9, 9];
  for (let n = 0; n < 60; n++) normal((low + high) / 2) < share ? (low = (low + high) / 2) : (high = (low + high) / 2);
  return (low + high) / 2;
}
