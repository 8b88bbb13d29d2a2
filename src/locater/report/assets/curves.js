// Numbers over steps or checkpoints: by layer for one view, by arm with intervals for runs.

function drawCurves(app, controls, place) {
  const drawn = [];
  if (app.view) drawn.push(...courseCharts(app.view, app));
  if (app.view && app.view.frames.length > 1 && !app.view.is_pair) drawn.push(...layerCurves(app));
  for (const runs of app.data.runs) drawn.push(...armCurves(runs));
  for (const study of app.data.studies) drawn.push(...studyCharts(study));
  const section = document.getElementById("curves");
  section.hidden = !drawn.length;
  document.getElementById("curves-title").textContent = app.views.length ? (app.view.frames.every((frame) => Number.isFinite(Number(frame))) ? "Over time" : "Model by model") : app.data.runs.length ? "Arms over training" : "What was measured";
  place.replaceChildren(...drawn);
}

// The losses of a run, the first thing that people look for; the step of the map is marked.
function courseCharts(view, app) {
  const names = Object.keys(view.course ?? {});
  const of = (words) => names.filter((name) => name.endsWith(words)).map((name, n) => ({ label: name, name, look: lineLook(n), points: view.course[name] }));
  const over = (element, x, y, box) => {
    const at = x.place(Number(view.frames[app.frame]));
    element.append(svg("line", { x1: at, x2: at, y1: box.top, y2: box.height - box.bottom, stroke: look("focus"), "stroke-dasharray": "3 3" }));
  };
  return [["loss", "Loss (lower is better)"], ["perplexity", "Perplexity on held-out text (lower is better)"]].map(([words, title]) => [of(words), title, words])
    .filter(([series]) => series.length).map(([series, title, words]) => figure(title, series, { key: true, over, x: { label: "training step", whole: true }, y: { label: words, ...(words === "perplexity" ? { range: laterRange(series) } : {}) } }));
}

// The mean of the chosen quantity over the heads of each layer; many layers share six colours and five dashes.
function layerCurves(app) {
  const { view } = app;
  const shown = app.shownQuantities();
  // Under words the number that trouble shows in first, where it was measured.
  const quantity = app.words ? shown.find(({ name }) => name === "max_logit") ?? shown[0] : app.quantity;
  const layers = new Map();
  for (let head = 0; head < view.count; head++) {
    const name = `${view.blocks[view.block[head]]} ${view.layer[head]}`;
    layers.set(name, [...(layers.get(name) ?? []), head]);
  }
  const steps = view.frames.map((frame, n) => (Number.isFinite(Number(frame)) ? Number(frame) : n));
  const mean = (heads, frame) => {
    const known = heads.map((head) => view.value(quantity.name, frame, head)).filter(Number.isFinite);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : NaN;
  };
  const series = [...layers].map(([label, heads], n) => ({ label, name: label, look: lineLook(n), points: steps.map((step, frame) => [step, mean(heads, frame)]) }));
  const numbered = view.frames.every((frame) => Number.isFinite(Number(frame)));
  const options = { key: series.length <= 12, x: { label: numbered ? "training step" : "model", ...(numbered ? { whole: true } : { ticks: steps, name: (n) => shortName(view.frames[n]) }) }, y: { label: quantity.symbol },
    over: (element, x, y, box) => {
      const mark = (step, colour) => element.append(svg("line", { x1: x.place(step), x2: x.place(step), y1: box.top, y2: box.height - box.bottom, stroke: colour, "stroke-dasharray": "3 3" }));
      for (const step of new Set(view.alarms.map((alarm) => alarm.step))) mark(step, look("warn"));
      mark(steps[app.frame], look("focus"));
    } };
  return [figure(`${quantity.symbol}, mean of each layer`, series, options), alarmList(app)].filter(Boolean);
}

function shortName(words) {
  return words.length > 14 ? `…${words.slice(-13)}` : words;
}

function alarmList(app) {
  if (!app.view.alarms.length) return null;
  const list = html("ul", { class: "small" });
  for (const alarm of app.view.alarms.slice(0, 40)) {
    const heads = alarm.heads ?? (alarm.head === null ? [] : [alarm.head]);
    const place = `${alarm.block} layer ${alarm.layer}` + (heads.length ? `, head${heads.length > 1 ? "s" : ""} ${heads.join(", ")}` : "");
    list.append(html("li", {}, `step ${alarm.step}: ${alarm.kind} in ${place}: ${alarm.meaning}; try ${alarm.remedy}`));
  }
  return html("div", {}, html("h3", {}, `Alarms (${app.view.alarms.length}), dashed in the chart`), list);
}

const ARM_WORDS = { perplexity: "Perplexity on held-out text (lower is better)", loss: "Loss on held-out data (lower is better)", entropy: "How evenly attention is spread (1 = all alike)",
  trace_over_temperature: "tr W/λ, mean over heads", eta_over_temperature: "η/λ, mean over heads", xi: "ξ, mean over heads", localisation: "Localisation, mean over heads",
  effective_rank: "Effective rank of the last layer", residual: "Rank residual of the last layer", near_mass: "Attention on the 16 nearest tokens" };

const ARM_HEADINGS = { entropy: "entropy", residual: "rank residual", trace_over_temperature: "tr W/λ", eta_over_temperature: "η/λ", xi: "ξ", localisation: "L", effective_rank: "rank", near_mass: "near" };

// By name and not by rank, so that an arm looks the same at every step; the arm compared with is drawn in ink.
function armLooks(runs) {
  const others = runs.arms.map((arm) => arm.arm).filter((name) => name !== runs.against).toSorted();
  const looks = Object.fromEntries(others.map((name, n) => [name, lineLook(n)]));
  if (runs.against !== null) looks[runs.against] = { colour: look("ink"), dash: "" };
  return looks;
}

function armCurves(runs) {
  const names = armQuantities(runs).filter((name) => runs.arms.some((arm) => arm.curves[name]?.step.length > 1));
  const looks = armLooks(runs);
  const figures = names.map((name) => {
    const series = runs.arms.filter((arm) => arm.curves[name]).map((arm) => {
      const { step, mean, standard_error: error } = arm.curves[name];
      const points = step.map((at, n) => (error[n] === null ? [at, mean[n]] : [at, mean[n], mean[n] - error[n], mean[n] + error[n]]));
      return { name: arm.arm, look: looks[arm.arm], points };
    });
    const options = { x: { label: "training step", whole: true }, y: { label: ARM_HEADINGS[name] ?? name } };
    if (name === runs.score) options.y.range = laterRange(series);
    return figure(ARM_WORDS[name], series, options);
  });
  return [armTable(runs, looks), ...figures];
}

// A loss says nothing next to its perplexity.
function armQuantities(runs) {
  return Object.keys(ARM_WORDS).filter((name) => (name !== "loss" || runs.score === "loss") && runs.arms.some((arm) => arm.quantities[name]));
}

// As many decimals as the error has two digits for.
function withError({ mean, standard_error: error }) {
  if (error === null || !(error > Math.abs(mean) * 1e-6)) return shownNumber(mean);
  const places = Math.min(4, Math.max(0, 1 - Math.floor(Math.log10(error))));
  return `${mean.toFixed(places)} ± ${error.toFixed(places)}`.replaceAll("-", "−");
}

// One arm in front of the others, in every chart.
function emphasise(name) {
  for (const line of document.querySelectorAll("#curve-body [data-name]")) line.style.opacity = name === null || line.dataset.name === name ? "" : "0.12";
}

// One table for the key of all charts and the numbers at the step compared at; bands are one standard error over seeds.
function armTable(runs, looks) {
  const columns = armQuantities(runs);
  const number = (found) => (found ? withError(found) : "–");
  const press = (event) => {
    const on = event.currentTarget.getAttribute("aria-pressed") !== "true";
    document.querySelectorAll(".arms [aria-pressed]").forEach((one) => one.setAttribute("aria-pressed", "false"));
    event.currentTarget.setAttribute("aria-pressed", String(on));
    emphasise(on ? event.currentTarget.textContent.trim() : null);
  };
  const rows = runs.arms.map((arm) => {
    const stroke = svg("svg", { width: 26, height: 10, "aria-hidden": "true" }, svg("line", { x1: 0, x2: 26, y1: 5, y2: 5, stroke: looks[arm.arm].colour,
      "stroke-width": 3, "stroke-dasharray": looks[arm.arm].dash }));
    const difference = runs.against === null ? [] : [html("td", {}, number(arm.differences?.[runs.score]))];
    return html("tr", {}, html("td", {}, stroke, html("button", { type: "button", class: "link", "aria-pressed": "false", onclick: press }, arm.arm)), html("td", {}, String(arm.seeds.length)), ...columns.slice(0, 1).map((name) => html("td", {}, number(arm.quantities[name]))),
      ...difference, ...columns.slice(1).map((name) => html("td", {}, number(arm.quantities[name]))));
  });
  const words = ["arm", "seeds", columns[0], ...(runs.against === null ? [] : [`minus ${runs.against}`]), ...columns.slice(1)].map((word) => html("th", { scope: "col" }, ARM_HEADINGS[word] ?? word.replaceAll("_", " ")));
  return html("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Arms" }, html("h3", {}, `Arms at step ${runs.step}, mean over seeds ± standard error`),
    html("p", { class: "small" }, "Click an arm to bring it to the front of every chart. Bands are one standard error over seeds."), html("table", { class: "arms" }, html("thead", {}, html("tr", {}, ...words)), html("tbody", {}, ...rows)));
}

// The range of the later steps: the first ones lie far above and would press the end into one line.
function laterRange(series) {
  const last = Math.max(...series.flatMap((one) => one.points.map((point) => point[0])));
  const later = series.flatMap((one) => one.points.filter((point) => point[0] >= last * 0.3));
  const values = later.flatMap(([, ...parts]) => parts).filter(Number.isFinite);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const margin = (high - low) * 0.08 || 1;
  return [low - margin, high + margin];
}

// A study: lines of means over x, one for each value of `by`, a chart for each value of `panel`.
function studyCharts({ figure: plan, rows, behind }) {
  const table = behind ? [behindTable(behind)] : [];
  return [...(plan.kind === "intervals" ? intervalCharts(plan, rows) : lineCharts(plan, rows)), ...table];
}

function lineCharts(plan, rows) {
  const panels = [...new Set(rows.map((row) => row[plan.panel]))];
  const names = [...new Set(rows.map((row) => String(row[plan.by])))];
  return panels.map((panel) => {
    const here = rows.filter((row) => row[plan.panel] === panel && Number.isFinite(row[plan.y]));
    const words = [...new Set(here.map((row) => row[plan.x]))];
    const counted = words.every((word) => typeof word === "number");
    const at = (row) => (counted ? row[plan.x] : words.indexOf(row[plan.x]));
    const called = (name) => `${plan.by_label ?? plan.by} ${name}`.trim();
    const kind = plan.kind === "points" ? { kind: "points" } : {};
    const series = names.map((name, n) => ({ label: called(name), name: called(name), look: lineLook(n), ...kind, points: meansOver(here.filter((row) => String(row[plan.by]) === name), at, plan.y) }))
      .filter((one) => one.points.length);
    const x = { label: plan.x_label || plan.x, factors: counted && plan.logarithmic && words.every((word) => word > 0) };
    if (!counted) Object.assign(x, { ticks: words.map((_, n) => n), name: (n) => String(words[n]) });
    return series.length ? figure(panel === undefined || panel === null ? plan.y_label || plan.y : `${plan.panel_label ?? plan.panel} ${panel}`.trim(), series, { key: true, x, y: { label: plan.y_label || plan.y } }) : "";
  }).filter(Boolean);
}

function meansOver(rows, at, name) {
  const groups = new Map();
  for (const row of rows) groups.set(at(row), [...(groups.get(at(row)) ?? []), row[name]]);
  return [...groups].sort((a, b) => a[0] - b[0]).map(([x, values]) => [x, values.reduce((sum, value) => sum + value, 0) / values.length]);
}

// A dot and a bar for each name, dark where the interval leaves out zero; a chart for each thing that was compared.
function intervalCharts(plan, rows) {
  return [...new Set(rows.map((row) => row[plan.panel]))].map((panel) => {
    const here = rows.filter((row) => row[plan.panel] === panel && Number.isFinite(row[plan.x]));
    const ends = [0, ...here.flatMap((row) => [row[plan.x], row.low, row.high])].filter(Number.isFinite);
    const [line, left, width] = [19, 190, 460];
    const height = here.length * line + 44;
    const x = axis([Math.min(...ends), Math.max(...ends)], [left, width - 24], { count: 4 });
    const words = here.map((row) => `${row[plan.by]}: ${shownNumber(row[plan.x])}`).join("; ");
    const drawn = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "font-size": 12.5, "font-family": "system-ui, sans-serif", "aria-label": `${panel}. ${words}` });
    drawn.append(svg("line", { x1: x.place(0), x2: x.place(0), y1: 4, y2: height - 38, stroke: look("ink"), "stroke-dasharray": "2 2" }));
    here.forEach((row, n) => {
      const [y, stroke] = [n * line + 14, row.seen ? lineLook(0).colour : look("soft")];
      drawn.append(svg("text", { x: left - 8, y: y + 4, "text-anchor": "end", fill: look("ink") }, row[plan.by].length > 29 ? `${row[plan.by].slice(0, 28)}…` : row[plan.by]));
      if (Number.isFinite(row.low) && Number.isFinite(row.high)) drawn.append(svg("line", { x1: x.place(row.low), x2: x.place(row.high), y1: y, y2: y, stroke, "stroke-width": 2 }));
      drawn.append(svg("circle", { cx: x.place(row[plan.x]), cy: y, r: 3.5, fill: stroke }));
    });
    for (const mark of x.marks) drawn.append(svg("text", { x: x.place(mark), y: height - 22, "text-anchor": "middle", fill: look("ink") }, tickName(mark)));
    drawn.append(svg("text", { x: (left + width) / 2, y: height - 5, "text-anchor": "middle", fill: look("ink") }, plan.x_label));
    return offer(html("figure", {}, html("h3", {}, panel), drawn), panel, () => drawn);
  });
}

// Every comparison that the sentences rest on.
function behindTable({ columns, rows }) {
  const cells = (row, tag, options = {}) => html("tr", {}, ...row.map((word) => html(tag, options, String(word))));
  return html("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "What the answer rests on" }, html("h3", {}, "What the answer rests on"),
    html("table", { class: "arms" }, html("thead", {}, cells(columns, "th", { scope: "col" })), html("tbody", {}, ...rows.map((row) => cells(row, "td")))));
}
