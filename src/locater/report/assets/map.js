// The map: a cell per head, layers downwards and heads to the right, on a canvas so that a large model stays quick.

const CELL = { least: 3, legible: 18, wide: 72, high: 36, highest: 64 };
const ROOM = { usual: 640, most: 1000 };
const MARGIN = { left: 46, top: 34 };
const TITLE_ROOM = 26;

// Where each head stands: rows are the layers of every block, in order.
function layoutOf(view) {
  const rows = new Map();
  for (let head = 0; head < view.count; head++) {
    const key = view.block[head] * 65536 + view.layer[head];
    if (!rows.has(key)) rows.set(key, rows.size);
  }
  const columns = Math.max(...view.head) + 1;
  const cells = new Int32Array(rows.size * columns).fill(-1);
  const row = Int32Array.from({ length: view.count }, (_, head) => rows.get(view.block[head] * 65536 + view.layer[head]));
  for (let head = 0; head < view.count; head++) cells[row[head] * columns + view.head[head]] = head;
  const labels = Array.from(rows.keys(), (key) => (view.blocks.length > 1 ? `${view.blocks[key >> 16].slice(0, 3)} ` : "") + (key & 65535));
  return { rows: rows.size, columns, cells, row, labels };
}

class HeadMap {
  constructor(app, place) {
    this.app = app;
    this.canvas = html("canvas", { tabindex: 0, role: "application", "aria-roledescription": "map of heads", id: "map" });
    this.tip = html("div", { class: "tip", "aria-hidden": "true", hidden: true });
    this.legend = html("div", {});
    place.replaceChildren(this.canvas, this.tip, this.legend);
    this.place = place;
    this.canvas.addEventListener("click", (event) => this.at(event) >= 0 && app.select(this.at(event)));
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("mouseleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - MARGIN.left) / this.width);
    const row = Math.floor((event.clientY - box.top - MARGIN.top) / this.height);
    const inside = column >= 0 && column < this.layout.columns && row >= 0 && row < this.layout.rows;
    return inside ? this.layout.cells[row * this.layout.columns + column] : -1;
  }

  point(event) {
    const head = this.at(event);
    this.tip.hidden = head < 0;
    if (head < 0) return;
    this.tip.textContent = this.app.describe(head);
    const box = this.place.getBoundingClientRect();
    const left = Math.min(event.clientX - box.left + 14, box.width - this.tip.offsetWidth - 4);
    this.tip.style.transform = `translate(${Math.max(0, left)}px, ${event.clientY - box.top + 16}px)`;
  }

  // Arrow keys go from head to head; Home and End to the ends of a layer; m keeps only heads of the same word marked.
  key(event) {
    const { columns, rows, cells, row } = this.layout;
    const view = this.app.view;
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const [here, column] = [row[this.app.selected], view.head[this.app.selected]];
    let goal = null;
    if (steps[event.key]) goal = [here + steps[event.key][0], column + steps[event.key][1]];
    if (event.key === "Home") goal = [here, 0];
    if (event.key === "End") goal = [here, columns - 1];
    if (event.key === "m" && this.app.words) this.app.markWord(view.wordOf(this.app.quantity.name, this.app.frame, this.app.selected));
    if (event.key === "Escape") this.app.mark(null, "");
    if (!goal || goal[0] < 0 || goal[0] >= rows || goal[1] < 0 || goal[1] >= columns) return;
    event.preventDefault();
    const found = cells[goal[0] * columns + goal[1]];
    if (found >= 0) this.app.select(found, true);
  }

  colour(head) {
    const { range } = this.app;
    if (this.app.words) return this.app.wordFor(head)?.colour ?? null;
    const value = this.app.value(head);
    return Number.isFinite(value) ? css(ramp(this.app.scale, (value - range.low) / (range.high - range.low))) : null;
  }

  draw() {
    this.layout = layoutOf(this.app.view);
    const room = this.place.clientWidth - MARGIN.left - 2;
    this.width = Math.max(CELL.least, Math.min(CELL.wide, Math.floor(room / this.layout.columns)));
    const tall = this.tall ?? ROOM.usual;
    this.height = Math.max(CELL.least, Math.min(this.tall ? CELL.highest : CELL.high, Math.floor(tall / this.layout.rows), this.width));
    const [width, height] = [MARGIN.left + this.layout.columns * this.width + 1, MARGIN.top + this.layout.rows * this.height + 1];
    const ratio = devicePixelRatio || 1;
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    this.canvas.setAttribute("aria-label", `Map of ${this.app.view.count} heads by ${this.app.quantity.words}. Arrow keys move from head to head.`);
    this.ground = html("canvas", { width: this.canvas.width, height: this.canvas.height });
    const pen = this.ground.getContext("2d");
    pen.scale(ratio, ratio);
    this.drawLabels(pen);
    this.drawCells(pen);
    this.outline();
    offer(this.canvas, this.app.figureTitle(), () => this.asSvg());
    this.legend.replaceChildren(this.app.words ? wordLegend(this.app) : drawLegend(this.app, Math.min(544, Math.max(280, this.place.clientWidth))));
  }

  // As tall as the head next to it, if rows stay legible: no hole below either.
  fill(section, head) {
    this.tall = null;
    this.draw();
    const lacking = head.offsetHeight - section.offsetHeight;
    if (Math.abs(lacking) < 8 || head.offsetTop !== section.offsetTop) return;
    const least = this.layout.rows * Math.min(CELL.legible, this.height);
    this.tall = Math.max(least, Math.min(ROOM.most, this.layout.rows * this.height + lacking));
    this.draw();
  }

  drawLabels(pen) {
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = look("soft");
    pen.textBaseline = "middle";
    const every = (size, least) => Math.max(1, [1, 2, 4, 5, 8, 10, 16, 20, 32, 64].find((step) => step * size >= least) ?? 128);
    pen.textAlign = "right";
    for (let row = 0; row < this.layout.rows; row += every(this.height, 13))
      pen.fillText(this.layout.labels[row], MARGIN.left - 6, MARGIN.top + (row + 0.5) * this.height);
    pen.textAlign = "center";
    for (let column = 0; column < this.layout.columns; column += every(this.width, 22))
      pen.fillText(column, MARGIN.left + (column + 0.5) * this.width, MARGIN.top - 8);
    pen.textAlign = "left";
    pen.fillText("layer", 0, MARGIN.top - 8);
    pen.fillText("head", MARGIN.left, MARGIN.top - 23);
  }

  drawCells(pen) {
    const { view, marked } = this.app;
    const gap = this.width > 8 && this.height > 8 ? 1 : 0;
    const unknown = hatching(pen);
    for (let head = 0; head < view.count; head++) {
      const [x, y] = this.corner(head);
      const colour = this.colour(head);
      pen.globalAlpha = marked && !marked.has(head) ? 0.14 : 1;
      pen.fillStyle = colour ?? unknown;
      pen.fillRect(x, y, this.width - gap, this.height - gap);
      if (this.app.words && colour) this.drawLetter(pen, head, x, y);
    }
    pen.globalAlpha = 1;
  }

  // The cells as they were drawn, and a frame around the head that is open: all that a step from head to head needs.
  outline() {
    const pen = this.canvas.getContext("2d");
    const ratio = devicePixelRatio || 1;
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    pen.drawImage(this.ground, 0, 0);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const [x, y] = this.corner(this.app.selected);
    pen.lineWidth = 2;
    pen.strokeStyle = look("ground");
    pen.strokeRect(x - 0.5, y - 0.5, this.width, this.height);
    pen.strokeStyle = look("focus");
    pen.strokeRect(x - 1.5, y - 1.5, this.width + 2, this.height + 2);
  }

  drawLetter(pen, head, x, y) {
    if (this.width < 12 || this.height < 11) return;
    const style = this.app.wordFor(head);
    pen.fillStyle = inkOn(style.colour);
    pen.textAlign = "center";
    pen.fillText(style.letter, x + this.width / 2, y + this.height / 2);
  }

  corner(head) {
    return [MARGIN.left + this.app.view.head[head] * this.width, MARGIN.top + this.layout.row[head] * this.height];
  }

  // With its title above and its scale below: a map that is sent on must still say what its colours mean.
  asSvg() {
    const cells = MARGIN.top + this.layout.rows * this.height + 8;
    const scale = this.app.words ? wordKey(this.app) : drawLegend(this.app, 420);
    const tall = Number(scale.getAttribute("viewBox").split(" ")[3]);
    const [width, height] = [Math.max(430, MARGIN.left + this.layout.columns * this.width + 8), TITLE_ROOM + cells + tall];
    const label = { "font-size": 11, "font-family": "system-ui, sans-serif", fill: look("soft") };
    const drawn = svg("g", { transform: `translate(0 ${TITLE_ROOM})` });
    for (let column = 0; column < this.layout.columns; column += Math.max(1, Math.ceil(22 / this.width)))
      drawn.append(text(column, MARGIN.left + (column + 0.5) * this.width, MARGIN.top - 6, { ...label, "text-anchor": "middle" }));
    drawn.append(text("layer", 4, MARGIN.top - 6, label), text("head", MARGIN.left, MARGIN.top - 21, label));
    const every = Math.max(1, Math.ceil(12 / this.height));
    this.layout.labels.forEach((words, row) => row % every || drawn.append(text(words, 4, MARGIN.top + (row + 0.75) * this.height, label)));
    for (let head = 0; head < this.app.view.count; head++) {
      const [x, y] = this.corner(head);
      const colour = this.colour(head);
      drawn.append(svg("rect", { x, y, width: this.width, height: this.height, fill: colour ?? look("panel") }));
      if (!colour) drawn.append(svg("path", { d: `M${x},${y + this.height}l${this.width},${-this.height}`, stroke: look("soft") }));
    }
    for (const [name, value] of [["x", 0], ["y", TITLE_ROOM + cells], ["width", 420], ["height", tall]]) scale.setAttribute(name, value);
    const title = text(this.app.figureTitle(), 4, 18, { ...label, "font-size": 13, fill: look("ink") });
    return svg("svg", { viewBox: `0 0 ${width} ${height}` }, svg("rect", { width, height, fill: look("panel") }), title, drawn, scale);
  }
}

// Of what is not known: no colour, so that no word can be mistaken for it.
function hatching(pen) {
  const tile = html("canvas", { width: 6, height: 6 });
  const stroke = tile.getContext("2d");
  stroke.strokeStyle = look("soft");
  for (const shift of [-6, 0, 6]) { stroke.moveTo(shift, 6); stroke.lineTo(shift + 6, 0); }
  stroke.stroke();
  return pen.createPattern(tile, "repeat");
}

// The heads of a word whose cells have the colour of another.
function drawnAs(app, code) {
  const others = app.headsOf(code).map((head) => app.wordFor(head)).filter((word) => word !== app.words[code]);
  const counts = app.words.map((word) => [others.filter((one) => one === word).length, word.name]).filter(([count]) => count);
  return counts.length ? ` (${counts.map(([count, name]) => `${count} drawn as ${name}`).join(", ")})` : "";
}

// Every word on the map with its colour, letter and count; a click marks its heads.
function wordLegend(app) {
  const list = html("div", { class: "words", role: "group", "aria-label": `Colours: ${app.quantity.words}` });
  app.words.forEach((word, code) => {
    const count = app.headsOf(code).length;
    if (!count) return;
    const swatch = html("span", { class: "swatch", "aria-hidden": "true" }, word.letter.trim());
    Object.assign(swatch.style, { background: word.colour, color: inkOn(word.colour) });
    list.append(html("button", { type: "button", id: `word-${word.name.replace(" ", "-")}`, title: word.rule ?? null, "aria-pressed": String(app.why === word.name && Boolean(app.marked)),
      onclick: () => app.markWord(code) }, swatch, html("b", {}, String(count)), ` ${app.meaningOf(word)}${drawnAs(app, code)}`));
  });
  const unknown = app.headsWith((words) => !words.length).length;
  if (unknown) list.append(html("span", { class: "small" }, html("span", { class: "swatch hatched", "aria-hidden": "true" }), `${unknown} not known`));
  return list;
}

// The colours of the words, for a map that is saved.
function wordKey(app) {
  const rows = Math.ceil(app.words.length / 3);
  const drawn = svg("svg", { viewBox: `0 0 420 ${12 + rows * 20}`, "font-size": 11, "font-family": "system-ui, sans-serif" });
  app.words.forEach((word, n) => {
    const [x, y] = [10 + (n % 3) * 130, 8 + Math.floor(n / 3) * 20];
    drawn.append(svg("rect", { x, y, width: 12, height: 12, fill: word.colour, stroke: look("soft") }), text(word.name, x + 18, y + 10, { fill: look("ink") }));
  });
  return drawn;
}

// The scale, with the heads' distribution over it and what its ends mean.
function drawLegend(app, width) {
  const { low, high, values } = app.range;
  const x = axis([low, high], [10, width - 10], { count: 5 });
  const step = (width - 20) / 40;
  const drawn = svg("svg", { viewBox: `0 0 ${width} 80`, class: "legend", role: "img", "font-size": 11, "font-family": "system-ui, sans-serif",
    "aria-label": `Scale from ${shownNumber(low)}, ${app.quantity.low}, to ${shownNumber(high)}, ${app.quantity.high}.` });
  const counts = new Array(40).fill(0);
  for (const value of values) counts[Math.min(39, Math.max(0, Math.floor(((value - low) / (high - low)) * 40)))]++;
  const most = Math.max(...counts, 1);
  for (let n = 0; n < 40; n++) {
    const size = (26 * counts[n]) / most;
    drawn.append(svg("rect", { x: 10 + n * step, y: 28 - size, width: step - 1, height: size, fill: look("soft"), opacity: 0.55 }));
    drawn.append(svg("rect", { x: 10 + n * step, y: 30, width: step + 0.5, height: 14, fill: css(ramp(app.scale, (n + 0.5) / 40)) }));
  }
  for (const mark of x.marks) drawn.append(text(shownNumber(mark), x.place(mark), 58, { "text-anchor": "middle", fill: look("soft") }));
  drawn.append(text(`◂ ${app.difference ? "fell" : app.quantity.low}`, 10, 74, { fill: look("ink") }));
  drawn.append(text(`${app.difference ? "rose" : app.quantity.high} ▸`, width - 10, 74, { "text-anchor": "end", fill: look("ink") }));
  return drawn;
}
