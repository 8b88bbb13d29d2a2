// One head: a sentence, its numbers among the model's, its eigenvalues, and what is known of it over position and distance.

function drawHead(app, place) {
  const { view, selected } = app;
  document.getElementById("head-title").textContent = `Head ${view.title(selected)}`;
  const figures = (...kinds) => figuresOf(app, kinds, place.clientWidth >= 528);
  const theory = figures(profileFigure, expectedFigure);
  place.replaceChildren(html("p", { class: "say" }, sentenceOn(app)), numbersOf(app), figures(eigenvalueFigure, logitFigure, attentionFigure), ...(theory.children.length ? [inTheory(app, theory)] : []));
}

function figuresOf(app, kinds, isBroad) {
  const known = kinds.filter((one) => one(app, BOX));
  return html("div", { class: "charts" }, ...known.map((one, n) => {
    // An odd last one fills its row.
    const wide = n === known.length - 1 && known.length % 2 === 1 && isBroad;
    const drawn = one(app, wide ? { ...BOX, width: 2 * BOX.width + 16 } : BOX);
    if (wide) drawn.classList.add("wide");
    return drawn;
  }));
}

// Curves of a random walk, and of logits without what all tokens share: they may rise where attention falls.
function inTheory(app, figures) {
  const said = app.view.has("does") ? (app.view.source.startsWith("estimated") ? "; the estimate above does not use them" : "; the measurement above does") : "";
  const details = html("details", { class: "theory", open: app.isTheoryOpen, ontoggle: () => { app.isTheoryOpen = details.open; } }, html("summary", {}, "In the paper's theory"),
    html("p", { class: "small" }, `These curves do not show where this head looks${said}.`), figures);
  return details;
}

// A share that is nearly none or all by its bound.
function percentOf(share) {
  const percent = Math.round(share * 100);
  if (percent === 0 && share > 0) return "less than 1%";
  return percent === 100 && share < 1 ? "more than 99%" : `${percent}%`;
}

const SMALLEST_REST = 0.01; // of attention that is not on the first token

function sentenceOn(app) {
  const { view, frame, selected } = app;
  const parts = [];
  const does = view.wordsOf("does", frame, selected).map((code) => app.data.behaviours[code]);
  if (does.length) parts.push(`It ${listed(does.map((word) => app.doing(word)))} (${view.source}).`);
  for (const [side, source] of [["measured_", "on the text measured"], ["", "on the text measured"], ["estimated_", "by estimate"]]) {
    const name = [`${side}near_mass_beyond_first`, `${side}near_mass`].find((one) => view.columns[one]);
    const near = name && view.value(name, frame, selected);
    if (!Number.isFinite(near)) continue;
    const beyond = name.endsWith("_beyond_first") || side === "estimated_";
    const first = beyond && side !== "estimated_" && view.columns[`${side}sink_mass`] ? view.value(`${side}sink_mass`, frame, selected) : NaN;
    const percent = Math.round((1 - first) * 100); // of little that remains a share says nothing
    if (1 - first < SMALLEST_REST) parts.push(`Less than 1% of its attention is not on the first token (${source}).`);
    else parts.push(`Of ${beyond ? `${percent < 100 ? `the ${percent}% of ` : ""}its attention that is not on the first token` : "its attention"}, ${side === "estimated_" ? `about ${Math.round(near * 100)}%` : percentOf(near)} falls on the 16 nearest tokens (${source}).`);
    break;
  }
  const regime = app.data.regimes[view.wordOf("regime", frame, selected)];
  if (regime) parts.push(`In the paper's theory of a random walk, ${regime.meaning}.`);
  if (view.columns.symmetry) {
    const symmetry = view.value("symmetry", frame, selected);
    parts.push(symmetry > 0.5 ? "W is nearly symmetric." : symmetry < -0.2 ? "W mostly rotates." : "W is neither symmetric nor a rotation.");
  }
  return parts.join(" ");
}

// Each number with a strip: the grey hill is the model's distribution, the line is this head.
function numbersOf(app) {
  const { view, frame, selected } = app;
  if (view.is_pair) return bothNumbers(app);
  const body = html("tbody", {});
  for (const quantity of app.shownQuantities()) {
    const value = view.value(quantity.name, frame, selected);
    if (!Number.isFinite(value)) continue;
    const sorted = app.sorted(quantity.name);
    body.append(html("tr", {}, html("th", { scope: "row" }, quantity.symbol, " ", html("small", {}, quantity.words)),
      html("td", { "data-quantity": quantity.name }, numberOf(quantity, value)), html("td", {}, ...(sorted.length > 1 ? [strip(sorted, value), html("small", {}, rankOf(sorted, value))] : []))));
  }
  const head = html("thead", {}, html("tr", {}, html("th", { scope: "col" }, "number"), html("th", { scope: "col" }, "this head"), html("th", { scope: "col" }, view.count > 1 ? "among all heads" : "")));
  return html("table", { class: "numbers" }, head, body);
}

// Of two models: the number of each, and how far it moved; what is a difference already has no value of either.
function bothNumbers(app) {
  const { view, selected } = app;
  const body = html("tbody", {});
  for (const quantity of app.shownQuantities()) {
    const pair = [0, 1].map((frame) => view.value(quantity.name, frame, selected));
    const change = quantity.name === "moved" ? shownNumber(pair[1]) : `${pair[1] > pair[0] ? "+" : ""}${shownNumber(pair[1] - pair[0])}`;
    if (pair.every(Number.isFinite)) body.append(html("tr", {}, html("th", { scope: "row" }, quantity.symbol, " ", html("small", {}, quantity.words)),
      ...pair.map((value, frame) => html("td", frame === 1 ? { "data-quantity": quantity.name } : {}, quantity.name === "moved" ? "" : numberOf(quantity, value))), html("td", {}, change)));
  }
  const heading = (name) => html("th", { scope: "col", title: name }, shortName(name).replaceAll("/", "/\u200b"));
  return html("table", { class: "numbers pair" }, html("thead", {}, html("tr", {}, ...["number", ...view.frames, "difference"].map(heading))), body);
}

function rankOf(sorted, value) {
  if (value === sorted.at(-1)) return value === sorted[0] ? "all alike" : "highest";
  const below = sorted.filter((one) => one < value).length;
  return below ? `above ${Math.min(99, Math.round((100 * below) / sorted.length))}% of heads` : "lowest";
}

function strip(sorted, value) {
  const [low, high] = [quantile(sorted, 0.01), quantile(sorted, 0.99)];
  const place = (one) => Math.min(99, Math.max(1, high > low ? ((one - low) / (high - low)) * 98 + 1 : 50));
  const counts = new Array(33).fill(0);
  for (const one of sorted) counts[Math.min(32, Math.floor(place(one) / 3.04))]++;
  const most = Math.max(...counts);
  const path = counts.map((count, n) => `L${(n + 0.5) * 3.03},${16 - (14 * count) / most}`).join("");
  return svg("svg", { viewBox: "0 0 100 17", preserveAspectRatio: "none", "aria-hidden": "true" },
  svg("path", { d: `M0,16${path}L100,16Z`, fill: look("soft"), opacity: 0.35 }),
  svg("line", { x1: place(value), x2: place(value), y1: 0, y2: 17, stroke: look("focus"), "stroke-width": 1.6 }));
}

// In the complex plane, with the mean as a cross and the root of the mean squared distance from it as a circle.
function eigenvalueFigure(app, around) {
  const flat = app.view.spectrum(app.selected);
  if (!flat || app.frame !== app.view.frames.length - 1) return null;
  const points = [];
  for (let n = 0; n < flat.length; n += 2) points.push([flat[n], flat[n + 1]]);
  const mean = points.reduce((sum, point) => sum + point[0], 0) / points.length;
  const radius = Math.sqrt(points.reduce((sum, [re, im]) => sum + (re - mean) ** 2 + im ** 2, 0) / points.length);
  const far = Math.max(...points.map(([re, im]) => Math.max(Math.abs(re - mean), Math.abs(im))), radius) * 1.08 || 1;
  const height = 300;
  const box = { ...around, height, left: 52 };
  const tall = far * (height - BOX.top - BOX.bottom) / (around.width - BOX.left - BOX.right);
  const over = (element, x, y) => {
    const [cx, cy] = [x.place(mean), y.place(0)];
    element.append(svg("ellipse", { cx, cy, rx: x.place(mean + radius) - cx, ry: cy - y.place(radius), fill: "none", stroke: look("focus"), "stroke-width": 1.5, "stroke-dasharray": "5 3" }));
    element.append(svg("path", { d: `M${cx - 6},${cy}h12M${cx},${cy - 6}v12`, stroke: look("focus"), "stroke-width": 2 }));
  };
  const stretch = Math.max(1, Math.max(...points.map((point) => Math.abs(point[1]))) * 1.1 / tall);
  return figure("Eigenvalues in the complex plane", [{ points, label: `of these ${points.length}: mean ${shownNumber(mean)} (cross), deviation ${shownNumber(radius)} (circle)`, kind: "points", look: lineLook(0) }],
    { box, key: true, over, x: { range: [mean - far * stretch, mean + far * stretch], label: "real part" }, y: { range: [-tall * stretch, tall * stretch], label: "imaginary part" } });
}

const PROFILE_WORDS = { closed: "closed form, without positions", positions: "closed form, with this head's positions" };

function profileFigure(app, box) {
  const { view, frame, selected } = app;
  const length = view.length ?? 1024;
  const series = [];
  for (const name of Object.keys(view.profiles ?? {})) {
    const line = view.line("profiles", name, selected);
    if (line) series.push({ points: onto(evenly(length, line.length), line), label: PROFILE_WORDS[name] ?? name, look: lineLook(series.length) });
  }
  if (!series.length && view.columns.trace_of_square) series.push({ ...momentProfile(view, frame, selected, length), look: lineLook(0) });
  if (!series.length) return null;
  return figure("Which tokens are heard (ρ)", series, { box, key: true,
    x: { range: [1, length], ticks: evenly(length, 5), label: "token t (the query is the last)" }, y: { range: [0, 1], label: "probability ρ" } });
}

const TEXT_WORDS = { predicted: "predicted for the text", measured: "measured on the text" };

function momentProfile(view, frame, head, length) {
  const value = (name) => view.value(name, frame, head);
  const moments = { trace: value("trace"), square: value("trace_of_square"), norm: value("frobenius_squared") };
  const positions = evenly(length, 128);
  return { points: onto(positions, closedForm(moments, length, value("temperature"), positions)), label: PROFILE_WORDS.closed };
}

function middles(bins) {
  return bins.map(([low, high]) => (low + high) / 2);
}

function expectedFigure(app, box) {
  return overDistance("Expected logit over distance", linesOf(app, "expected_logits", app.view.distances, () => "from the weights: two tokens of like content", 0), box);
}

function logitFigure(app, box) {
  return overDistance("Logit over distance", linesOf(app, "logit_profile", middles(app.view.bins ?? []), (name) => TEXT_WORDS[name] ?? name, 1), box);
}

// What this head has of a group of lines.
function linesOf({ view, selected }, group, places, called, first) {
  return Object.keys(view[group] ?? {}).map((name, n) => ({ line: view.line(group, name, selected), label: called(name), look: lineLook(n + first) }))
    .filter((one) => one.line).map(({ line, ...rest }) => ({ points: onto(places, line), ...rest }));
}

function overDistance(title, series, box) {
  if (!series.length) return null;
  const furthest = Math.max(...series.flatMap((one) => one.points.map((point) => point[0])));
  const drawn = figure(title, series, { box, key: true, x: { range: [0, furthest], log: true, label: "distance Δ in tokens" }, y: { label: "logit ω" } });
  drawn.append(html("p", { class: "small hint" }, "Logit: the attention score before the softmax."));
  return drawn;
}

function attentionFigure(app, box) {
  const series = linesOf(app, "attention_profile", middles(app.view.bins ?? []), (name) => TEXT_WORDS[name] ?? name, 1);
  if (!series.length) return null;
  const furthest = Math.max(...series[0].points.map((point) => point[0]));
  return figure("Attention over distance, without the first token", series, { box, key: true, x: { range: [0, furthest], log: true, label: "distance in tokens, doubling bins" },
    y: { range: [0, Math.max(...series.flatMap((one) => one.points.map((point) => point[1])), 0.1)], label: "share of attention" } });
}
