// The paper's closed form: the probability that token t is heard, from three moments of W. The same as theory/closed_form.py.

// The standard normal distribution function. Near zero by its series, in the tails by a continued fraction: both to 1e-15.
function normal(x) {
  const size = Math.abs(x);
  if (size > 38) return x > 0 ? 1 : 0;
  const density = Math.exp(-size * size / 2) / Math.sqrt(2 * Math.PI);
  if (size < 5) {
    let term = size;
    let sum = size;
    for (let n = 3; term > sum * 1e-17; n += 2) sum += term *= (size * size) / n;
    return x > 0 ? 0.5 + density * sum : 0.5 - density * sum;
  }
  let fraction = size;
  for (let n = 60; n > 0; n--) fraction = size + n / fraction;
  return x > 0 ? 1 - density / fraction : density / fraction;
}

// P(lower < N(mean, variance) < upper); a variance of zero makes it 0 or 1.
function between(lower, upper, mean, variance) {
  if (!(variance > 0)) return mean > lower && mean < upper ? 1 : 0;
  const deviation = Math.sqrt(variance);
  return Math.min(1, Math.max(0, normal((upper - mean) / deviation) - normal((lower - mean) / deviation)));
}

// The sum of the walk's weights c, and T times their square, at token t of T.
function walkWeights(t, length) {
  const after = length - t;
  const squares = (t - 1) * t * (2 * t - 1) + after * (after + 1) * (2 * after + 1);
  return [t - (length + 1) / 2, squares / (6 * length)];
}

// The closed form at some positions; `moments` has trace, square (tr W²) and norm (‖W‖²).
function closedForm(moments, length, temperature, positions) {
  return positions.map((t) => {
    const [total, squares] = walkWeights(t, length);
    const variance = total * total * moments.square + squares * moments.norm;
    return between(-temperature, (length - 1) * temperature, total * moments.trace, variance);
  });
}

function evenly(length, most) {
  const count = Math.min(length, most);
  return Array.from({ length: count }, (_, n) => (count < 2 ? 1 : Math.round(1 + (n * (length - 1)) / (count - 1))));
}

// The share of the context that is left out, as theory/regimes.py has it.
function localisation(profile) {
  const total = profile.reduce((sum, value) => sum + value, 0);
  if (!(total > 0) || profile.length < 2) return 0;
  const entropy = profile.reduce((sum, value) => sum - (value > 0 ? (value / total) * Math.log(value / total) : 0), 0);
  return Math.min(1, Math.max(0, 1 - (Math.exp(entropy) - 1) / (profile.length - 1)));
}

// The regime's word, with the thresholds that theory/regimes.py gives.
function regimeOf(profile, limits) {
  const highest = Math.max(...profile);
  const size = Math.max(1, Math.round(limits.end * profile.length));
  const mean = (part) => part.reduce((sum, value) => sum + value, 0) / part.length;
  if (highest < limits.no_signal) return "no-signal";
  if (Math.min(...profile) >= limits.flat * highest) return "uniform";
  const starts = mean(profile.slice(0, size)) >= limits.low * highest;
  const ends = mean(profile.slice(-size)) >= limits.low * highest;
  return starts ? (ends ? "mixed" : "early") : ends ? "late" : "middle";
}
