// The page: what is chosen, and which parts are drawn anew when that changes.

// Colours that are words: their column, and the list of words in the data.
const WORD_KINDS = { does: ["what the head does", "behaviours"], regime: ["regime, in the random-walk theory", "regimes"] };
const MOST_SHORT = 260; // pixels: a map that is lower stands above its head, not next to it

class App {
  constructor(data) {
    Object.assign(this, { data, views: data.views, number: 0, frame: 0, selected: 0, marked: null, difference: false, bound: null, side: "above" });
    if (this.views.length) this.start();
    startTheme(() => this.draw());
    addEventListener("beforeprint", () => this.table?.drawRows(true)); // after the theme's own redrawing
    addEventListener("afterprint", () => this.table?.drawRows());
    document.querySelectorAll("[data-sentence]").forEach((button) => button.addEventListener("click", () => this.follow(data.sentences[button.dataset.sentence])));
    this.draw();
    startExport(this.table);
    document.documentElement.dataset.ready = "yes";
  }

  // Two models open with what differs between them; else the first view, with what is wrong or stands out.
  start() {
    this.number = Math.max(0, this.views.findIndex((view) => view.is_pair));
    this.difference = this.view.is_pair;
    this.frame = this.view.frames.length - 1;
    const named = (met) => this.data.sentences.find((one) => met(one) && one.view === this.number && one.heads.length)?.heads[0];
    this.selected = named((one) => one.tone === "warning") ?? named((one) => one.text.startsWith("Look first")) ?? (this.view.is_pair ? named(() => true) : null) ?? this.mostPronounced();
    // What heads do comes first, then the theory.
    const wanted = this.view.is_pair ? ["eta_over_temperature"] : ["does", "normalised_entropy", "xi"];
    this.choose(wanted.find((name) => this.view.columns[name] || (WORD_KINDS[name] && this.view.has(name))) ?? this.shownQuantities()[0]?.name ?? "regime");
    this.map = new HeadMap(this, document.getElementById("map-figure"));
    this.table = new HeadTable(this, document.getElementById("table-controls"), document.getElementById("table-body"));
    addEventListener("resize", () => this.fit());
  }

  // The head to open with where nothing is wrong: the one whose mean stands out most against its scale.
  mostPronounced() {
    let best = 0;
    for (let head = 0; head < this.view.count && this.view.columns.xi; head++)
      if (Math.abs(this.view.value("xi", this.frame, head)) > Math.abs(this.view.value("xi", this.frame, best))) best = head;
    return best;
  }

  get view() { return this.views[this.number]; }
  get scale() { return this.difference ? "diverging" : this.quantity.scale; }

  value(head) {
    const value = this.view.value(this.quantity.name, this.frame, head);
    return this.difference ? value - this.view.value(this.quantity.name, 0, head) : value;
  }

  // All known values of a column in order, kept: every strip asks for them.
  sorted(name) {
    const key = `${this.number} ${this.frame} ${name}`;
    this.orders ??= new Map();
    if (!this.orders.has(key)) {
      const start = this.frame * this.view.count;
      this.orders.set(key, this.view.columns[name].slice(start, start + this.view.count).filter(Number.isFinite).sort());
    }
    return this.orders.get(key);
  }

  // The words that colour the map, where it is coloured by words.
  get words() { const kind = WORD_KINDS[this.quantity.name]; return kind && this.data[kind[1]]; }
  wordFor(head) { return this.words[this.view.wordOf(this.quantity.name, this.frame, head)]; }
  // An estimate says "probably"; a measurement does not.
  meaningOf(word) { return this.quantity.name === "does" ? this.doing(word) : word.meaning; }
  doing(word) { return this.view.source.startsWith("estimated") && word.name !== "unclear" ? `probably ${word.meaning}` : word.meaning; }
  namesOf(kind, head) { return this.view.wordsOf(kind, this.frame, head).map((code) => this.data[WORD_KINDS[kind][1]][code].name); }
  headsWith(test) { return Array.from({ length: this.view.count }, (_, head) => head).filter((head) => test(this.view.wordsOf(this.quantity.name, this.frame, head))); }
  headsOf(code) { return this.headsWith((words) => words.includes(code)); }
  // A column whose ratio to the temperature is there says nothing of its own.
  shownQuantities() { return this.data.quantities.filter(({ name }) => this.view.columns[name] && !this.view.columns[`${name}_over_temperature`]); }
  figureTitle() { return `${this.view.name}: ${this.quantity.words}`; }

  choose(name) {
    const kind = WORD_KINDS[name];
    this.quantity = kind ? { name, symbol: name, words: kind[0], low: "", high: "", scale: "words", basis: "" } : this.data.quantities.find((one) => one.name === name);
    if (kind) this.difference = false;
    else this.range = rangeOf(this.views, this.quantity, this.difference);
  }

  describe(head) {
    if (this.words) return `${this.view.title(head)}: ${this.view.wordsOf(this.quantity.name, this.frame, head).map((code) => this.meaningOf(this.words[code])).join(", ") || "not known"}`;
    return `${this.view.title(head)}: ${this.quantity.symbol} ${this.difference ? `changed by ${shownNumber(this.value(head))}` : `= ${numberOf(this.quantity, this.value(head))}`}`;
  }

  select(head) {
    this.selected = head;
    this.drawStatus();
    this.map.outline();
    drawHead(this, document.getElementById("head-body"));
    this.table.drawRows();
  }

  mark(heads, why) {
    this.marked = heads && new Set(heads);
    this.why = why;
    this.drawControls();
    this.drawStatus();
    this.map.draw();
    this.table.refresh();
  }

  markWord(code) {
    const name = this.words[code]?.name;
    return this.why === name ? this.mark(null, "") : this.mark(this.headsOf(code), name);
  }

  markBeyond(value) {
    const test = this.side === "above" ? (one) => one >= value : (one) => one <= value;
    this.bound = value;
    const heads = Array.from({ length: this.view.count }, (_, head) => head).filter((head) => test(this.value(head)));
    this.mark(heads, `${this.quantity.symbol} ${this.side} ${shownNumber(value)}`);
  }

  // After a change of view: its last frame, a quantity that it has, and no difference where there is nothing to differ from.
  settle() {
    this.frame = this.view.frames.length - 1;
    if (this.view.frames.length < 2) this.difference = false;
    const { name } = this.quantity;
    this.choose(this.words ? (this.view.has(name) ? name : this.shownQuantities()[0]?.name ?? name) : this.view.columns[name] ? name : this.shownQuantities()[0]?.name ?? "regime");
  }

  // A sentence of the headline: its view, its heads marked, the first of them opened.
  follow(sentence) {
    this.number = sentence.view;
    this.settle();
    this.marked = new Set(sentence.heads);
    this.why = "the sentence chosen";
    this.selected = sentence.heads[0];
    this.draw();
    document.getElementById("map-section").scrollIntoView({ block: "start" });
    document.getElementById("map").focus({ preventScroll: true });
  }

  draw() {
    drawColours(this, document.getElementById("colours"));
    drawCurves(this, document.getElementById("curve-controls"), document.getElementById("curve-body"));
    for (const id of ["map-section", "table-section"]) document.getElementById(id).hidden = !this.views.length;
    if (!this.views.length) return;
    // A map or a table of one head would be one cell.
    for (const id of ["map-figure", "status", "hint", "table-section"]) document.getElementById(id).hidden = this.view.count === 1;
    document.getElementById("map-title").textContent = this.view.count === 1 ? "The only head" : "All heads";
    this.drawControls();
    this.drawStatus();
    drawHead(this, document.getElementById("head-body"));
    this.fit();
    this.table.refresh();
  }

  // The map as tall as the head next to it; above it where it is low.
  fit() {
    this.map.tall = null;
    this.map.draw();
    const both = document.getElementById("map-section");
    both.classList.toggle("stacked", this.map.layout.rows * CELL.high < MOST_SHORT);
    this.map.fill(both.firstElementChild, both.lastElementChild);
  }

  drawStatus() {
    const marked = this.marked ? ` ${this.marked.size} head${this.marked.size === 1 ? "" : "s"} marked: ${this.why}.` : "";
    document.getElementById("status").textContent = `${this.describe(this.selected)}.${marked}`;
  }

  drawControls() {
    const parts = [modelChoice(this), this.view.count > 1 && quantityChoice(this), frameSlider(this), boundSlider(this)];
    const marks = this.words ? " A click on a word above marks all its heads; the key m marks those of the open head's word." : "";
    const several = this.quantity.name === "does" ? " A head that does several things has the colour of the first in the list, and is counted with each." : "";
    const hint = document.getElementById("hint");
    hint.textContent = `Point at a cell for its number; click or use the arrow keys to open a head; Escape shows all again.${marks}${several} `;
    if (this.words) hint.append(html("a", { href: "#words-title", onclick: () => { document.querySelector("#colours details").open = true; } }, "What the words mean"));
    if (this.marked) parts.push(html("button", { type: "button", onclick: () => { this.bound = null; this.mark(null, ""); } }, "show all"));
    const place = document.getElementById("map-controls");
    const focused = place.contains(document.activeElement) ? document.activeElement.id : "";
    place.replaceChildren(...parts.filter(Boolean));
    if (focused) document.getElementById(focused)?.focus();
  }
}

function modelChoice(app) {
  if (app.views.length < 2) return null;
  return selection("model", "model", app.views.map((view, n) => [n, view.name]), app.number, (value) => {
    Object.assign(app, { number: Number(value), selected: 0, marked: null, bound: null });
    app.settle();
    app.draw();
  });
}

function quantityChoice(app) {
  const options = app.shownQuantities().map((one) => [one.name, `${one.symbol}: ${one.words}`]);
  for (const [kind, [words]] of Object.entries(WORD_KINDS).toReversed()) if (app.view.has(kind)) options[kind === "does" ? "unshift" : "push"]([kind, words]);
  return selection("quantity", "colour by", options, app.quantity.name, (name) => {
    app.choose(name);
    app.bound = null;
    app.draw();
  });
}

function frameSlider(app) {
  const { frames } = app.view;
  if (frames.length < 2) return null;
  const go = (value) => { app.frame = Number(value); app.draw(); };
  const slide = (event) => go(event.target.value);
  const slider = html("input", { type: "range", id: "frame", min: 0, max: frames.length - 1, step: 1, value: app.frame, "aria-valuetext": frames[app.frame], oninput: slide });
  const differ = html("input", { type: "checkbox", id: "difference", checked: app.difference, onchange: (event) => {
    app.difference = event.target.checked;
    app.choose(app.words ? app.shownQuantities()[0].name : app.quantity.name);
    app.draw();
  } });
  const numbered = frames.every((frame) => Number.isFinite(Number(frame)));
  const choice = numbered ? html("label", {}, "step ", slider, html("output", {}, frames[app.frame])) : selection("frame", "of ", frames.map((frame, n) => [n, frame]), app.frame, go);
  return html("span", { class: "group" }, choice, html("label", {}, differ, `difference to ${numbered ? "step " : ""}${frames[0]}`));
}

function boundSlider(app) {
  if (app.words || app.view.count === 1) return null;
  const { low, high } = app.range;
  const slider = html("input", { type: "range", id: "bound", min: low, max: high, step: "any", value: app.bound ?? (app.side === "above" ? low : high),
    "aria-label": `Mark heads with ${app.quantity.symbol} ${app.side} this value`, oninput: (event) => { event.target.nextSibling.textContent = shownNumber(Number(event.target.value)); }, onchange: (event) => app.markBeyond(Number(event.target.value)) });
  const side = selection("side", "mark heads", [["above", "above"], ["below", "below"]], app.side, (value) => { app.side = value; app.bound = null; app.drawControls(); });
  return html("span", { class: "group" }, side, slider, html("output", {}, shownNumber(Number(slider.value))));
}

// The table of what each colour means.
function drawColours(app, place) {
  const list = html("dl", {});
  for (const [said, words] of [["", app.data.behaviours], ["in the random-walk theory, ", app.data.regimes]])
    for (const word of words) {
      const swatch = html("span", { class: "swatch", "aria-hidden": "true" });
      swatch.style.background = word.colour;
      list.append(html("dt", {}, swatch, `${word.name} (${word.letter.trim() || "blank"})`), html("dd", {}, said + word.meaning + (word.rule ? `: ${word.rule}` : "")));
    }
  for (const quantity of app.data.quantities)
    list.append(html("dt", {}, quantity.symbol), html("dd", {}, `${quantity.words}; low: ${quantity.low}; high: ${quantity.high}. It rests on ${quantity.basis}.`));
  place.replaceChildren(html("details", {}, html("summary", {}, "Every quantity and colour"), list));
}

readData().then((data) => { window.locater = { app: new App(data), closedForm, normal }; });
