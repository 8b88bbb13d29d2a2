// The plane: mean of the eigenvalues to the right, their spread upwards; theory next to a simulated softmax layer.

const PLANE = { width: 330, height: 250, left: 50, right: 12, top: 12, bottom: 44, bend: 0.03 };
const PLANE_TICKS = { x: [-3, -1, -0.3, -0.1, 0, 0.1, 0.3, 1, 3], y: [0.003, 0.01, 0.03, 0.1, 0.3, 1, 3] };

// Along x the scale bends: equal steps are equal factors beyond ±0.03, and linear between. Both bends are drawn.
function planeAxes(plane) {
  const [low, high] = [plane.x[0], plane.x.at(-1)].map((value) => Math.asinh(value / PLANE.bend));
  const [bottom, top] = [plane.y[0], plane.y.at(-1)].map(Math.log);
  const wide = PLANE.width - PLANE.left - PLANE.right;
  const tall = PLANE.height - PLANE.top - PLANE.bottom;
  return {
    x: (value) => PLANE.left + ((Math.asinh(value / PLANE.bend) - low) / (high - low)) * wide,
    y: (value) => PLANE.height - PLANE.bottom - ((Math.log(value) - bottom) / (top - bottom)) * tall,
    back: (px, py) => [PLANE.bend * Math.sinh(low + ((px - PLANE.left) / wide) * (high - low)), Math.exp(bottom + ((PLANE.height - PLANE.bottom - py) / tall) * (top - bottom))],
    wide, tall,
  };
}

// One panel: cells by `colourAt(column, row)` over nx × ny of equal size, axes, the heads of a scan, and the current point.
function drawPlane(explorer, title, nx, ny, colourAt, note, key) {
  const at = planeAxes(explorer.plane);
  const ground = keptGround(explorer, `${title} ${isDark()} ${key ? "" : `${explorer.knobs.length} ${explorer.knobs.symmetry} ${explorer.knobs.width}`}`, nx, ny, colourAt);
  const drawn = svg("svg", { viewBox: `0 0 ${PLANE.width} ${PLANE.height}`, class: "chart", role: "img", "font-size": 11, "font-family": "system-ui, sans-serif", "aria-label": `${title}. ${note}` });
  drawn.append(svg("rect", { width: PLANE.width, height: PLANE.height, fill: look("panel") }));
  drawn.append(svg("image", { href: ground, x: PLANE.left, y: PLANE.top, width: at.wide, height: at.tall, preserveAspectRatio: "none", "image-rendering": "pixelated" }));
  planeScale(drawn, at);
  for (const head of explorer.heads) drawn.append(svg("circle", { ...inFrame(at, head.trace, head.deviation), r: 2.4, fill: "#fff", stroke: "#000", "stroke-width": 0.7, opacity: 0.85 }));
  const [x, y] = [explorer.knobs.trace / explorer.knobs.temperature, explorer.knobs.deviation / explorer.knobs.temperature];
  drawn.append(svg("circle", { ...inFrame(at, x, y), r: 6.5, fill: "none", stroke: "#000", "stroke-width": 4 }), svg("circle", { ...inFrame(at, x, y), r: 6.5, fill: "none", stroke: "#fff", "stroke-width": 2 }));
  drawn.addEventListener("click", (event) => {
    const box = drawn.getBoundingClientRect();
    const scale = PLANE.width / box.width;
    explorer.jump(...at.back((event.clientX - box.left) * scale, (event.clientY - box.top) * scale));
  });
  return offer(html("figure", {}, html("h3", {}, title), drawn, html("figcaption", {}, html("span", {}, key ?? "", note))), title, () => drawn);
}

// The cells as a picture, kept: only the theory's depend on sliders, and only on some.
function keptGround(explorer, name, nx, ny, colourAt) {
  explorer.grounds ??= new Map();
  if (!explorer.grounds.has(name)) {
    const cells = html("canvas", { width: nx, height: ny });
    const pen = cells.getContext("2d");
    for (let row = 0; row < ny; row++)
      for (let column = 0; column < nx; column++) {
        pen.fillStyle = colourAt(column, row);
        pen.fillRect(column, ny - 1 - row, 1, 1);
      }
    explorer.grounds.set(name, cells.toDataURL());
  }
  return explorer.grounds.get(name);
}

// What lies beyond the plane stands on its edge.
function inFrame(at, trace, deviation) {
  const cx = Math.min(PLANE.width - PLANE.right, Math.max(PLANE.left, at.x(trace)));
  return { cx, cy: Math.min(PLANE.height - PLANE.bottom, Math.max(PLANE.top, at.y(deviation))) };
}

// From 0 to 1 in five patches.
function rampKey() {
  const patches = [0, 0.25, 0.5, 0.75, 1].map((share) => {
    const patch = html("span", { class: "swatch", "aria-hidden": "true" });
    patch.style.background = css(ramp("magma", share));
    return patch;
  });
  return html("span", {}, "0 ", ...patches, "1 ");
}

function planeScale(drawn, at) {
  const soft = look("soft");
  for (const value of PLANE_TICKS.x) {
    drawn.append(svg("line", { x1: at.x(value), x2: at.x(value), y1: PLANE.height - PLANE.bottom, y2: PLANE.height - PLANE.bottom + 4, stroke: soft }));
    drawn.append(text(shownNumber(value), at.x(value), PLANE.height - PLANE.bottom + 15, { "text-anchor": "middle", fill: soft, "font-size": 9 }));
  }
  for (const value of PLANE_TICKS.y) drawn.append(text(shownNumber(value), PLANE.left - 5, at.y(value) + 4, { "text-anchor": "end", fill: soft }));
  for (const value of [-PLANE.bend, PLANE.bend])
    drawn.append(svg("line", { x1: at.x(value), x2: at.x(value), y1: PLANE.top, y2: PLANE.height - PLANE.bottom, stroke: "#fff", "stroke-dasharray": "2 4", opacity: 0.7 }));
  drawn.append(text("mean of the eigenvalues, as tr W/λ", (PLANE.left + PLANE.width) / 2, PLANE.height - 16, { "text-anchor": "middle", fill: look("ink") }));
  drawn.append(text("(linear between the dotted lines, by factors beyond)", (PLANE.left + PLANE.width) / 2, PLANE.height - 4, { "text-anchor": "middle", fill: soft, "font-size": 9 }));
  const middle = (PLANE.top + PLANE.height - PLANE.bottom) / 2;
  drawn.append(text("spread, as √d·σ/λ", 12, middle, { "text-anchor": "middle", fill: look("ink"), transform: `rotate(-90 12 ${middle})` }));
}

const CELLS = [72, 44];

// The theory's regimes at the sliders' T and symmetry, computed here.
function theoryPlane(explorer) {
  const at = planeAxes(explorer.plane);
  const positions = evenly(explorer.knobs.length, 33);
  const colours = Object.fromEntries(explorer.data.regimes.map((regime) => [regime.name, regime.colour]));
  const colourAt = (column, row) => {
    const [trace, deviation] = at.back(PLANE.left + ((column + 0.5) / CELLS[0]) * at.wide, PLANE.height - PLANE.bottom - ((row + 0.5) / CELLS[1]) * at.tall);
    const moments = toyMoments({ ...explorer.knobs, trace, deviation, temperature: 1 });
    return colours[regimeOf(closedForm(moments, explorer.knobs.length, 1, positions), explorer.data.limits)];
  };
  return drawPlane(explorer, "Theory: regime", ...CELLS, colourAt, `Click to go there.${explorer.heads.length ? " Each dot is a head of the scan; those beyond stand on the edge. A click near a dot, or a slider released there, takes that head." : ""}`);
}

// What the true softmax does at each point: numbers by spread and mean, made with the page.
function softmaxPlane(explorer, values, title, note) {
  const { plane } = explorer;
  const at = planeAxes(plane);
  const nearest = (edges, value, bend) => edges.reduce((best, edge, n) => (Math.abs(bend(edge) - bend(value)) < Math.abs(bend(edges[best]) - bend(value)) ? n : best), 0);
  const colourAt = (column, row) => {
    const [trace, deviation] = at.back(PLANE.left + ((column + 0.5) / CELLS[0]) * at.wide, PLANE.height - PLANE.bottom - ((row + 0.5) / CELLS[1]) * at.tall);
    return css(ramp("magma", values[nearest(plane.y, deviation, Math.log)][nearest(plane.x, trace, (value) => Math.asinh(value / PLANE.bend))]));
  };
  return drawPlane(explorer, title, ...CELLS, colourAt, note, rampKey());
}
