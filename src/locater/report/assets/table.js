// The table: only the rows in sight are in the document, so that many thousands scroll as easily as ten.

const ROW = 28;
const SPARE = 12;
const PRINTED = 60;
const CONDITION = /^([^<>=!]+)(<=|>=|!=|=|<|>)(.+)$/;
const TESTS = { "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b, "=": (a, b) => a === b, "!=": (a, b) => a !== b };

class HeadTable {
  constructor(app, controls, place) {
    this.app = app;
    this.order = { name: "title", down: false };
    this.filter = html("input", { type: "search", id: "filter", placeholder: filterExample(app), size: Math.max(24, filterExample(app).length + 4), "aria-describedby": "filter-says", oninput: () => this.refresh() });
    this.says = html("span", { id: "filter-says", role: "status" });
    controls.replaceChildren(html("label", {}, "filter ", this.filter), this.says);
    this.body = html("tbody", {});
    this.headings = html("tr", {});
    this.table = html("table", { class: "heads", "aria-labelledby": "table-title" }, html("thead", {}, this.headings), this.body);
    this.scroll = html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of heads, scrollable" }, this.table);
    this.scroll.addEventListener("scroll", () => this.drawRows());
    place.replaceChildren(this.scroll);
  }

  columns() {
    const cells = [{ name: "title", heading: "head", of: (head) => this.app.view.title(head) }];
    if (this.app.view.has("does")) cells.push({ name: "does", heading: "what it does", of: (head) => this.app.namesOf("does", head).join(", ") });
    for (const quantity of this.app.shownQuantities())
      cells.push({ name: quantity.name, heading: quantity.symbol, words: quantity.words, quantity, of: (head) => this.app.view.value(quantity.name, this.app.frame, head) });
    if (this.app.view.has("regime")) cells.push({ name: "regime", heading: "regime", of: (head) => this.app.namesOf("regime", head).join() });
    return cells;
  }

  // Heads that meet every condition; a word that is no condition must stand in the head's name or regime.
  found() {
    const tests = [];
    this.wrong = "";
    for (const part of this.filter.value.trim().split(/[\s,]+/).filter(Boolean)) {
      const [, name, sign, value] = part.match(CONDITION) ?? [];
      if (!name) tests.push((head) => [this.app.view.title(head), ...this.words("does", head), ...this.words("regime", head)].join(" ").includes(part));
      else if (["does", "regime", "block"].includes(name)) tests.push((head) => this.words(name, head).some((word) => word === value || word.startsWith(`${value} `)) === (sign !== "!="));
      else if (this.number(name, 0) === undefined || Number.isNaN(Number(value))) this.wrong = `no such condition: ${part}`;
      else tests.push((head) => TESTS[sign](this.number(name, head), Number(value)));
    }
    const all = this.app.marked ? [...this.app.marked] : Array.from({ length: this.app.view.count }, (_, head) => head);
    return all.filter((head) => tests.every((test) => test(head)));
  }

  words(name, head) {
    return name === "block" ? [this.app.view.blocks[this.app.view.block[head]]] : this.app.namesOf(name, head);
  }

  number(name, head) {
    const { view, frame } = this.app;
    if (name === "layer" || name === "head") return view[name][head];
    const column = view.columns[name] ? name : this.app.shownQuantities().find((one) => asCondition(one) === name)?.name;
    return column && view.value(column, frame, head);
  }

  refresh() {
    const column = this.columns().find((one) => one.name === this.order.name) ?? this.columns()[0];
    this.rows = this.found();
    const compare = (a, b) => {
      if (column.name === "title") return a - b;
      const [first, second] = [column.of(a), column.of(b)];
      if (typeof first === "string") return first.localeCompare(second) || a - b;
      if (Number.isNaN(first) || Number.isNaN(second)) return Number.isNaN(first) - Number.isNaN(second);
      return first - second || a - b;
    };
    this.rows.sort((a, b) => (this.order.down ? compare(b, a) : compare(a, b)));
    this.says.textContent = this.wrong || `${this.rows.length} of ${this.app.view.count} head${this.app.view.count === 1 ? "" : "s"}`;
    this.says.classList.toggle("wrong", Boolean(this.wrong));
    this.drawHeadings();
    this.drawRows();
  }

  drawHeadings() {
    this.headings.replaceChildren(...this.columns().map((column) => {
      const is = column.name === this.order.name;
      const sort = () => {
        this.order = { name: column.name, down: is ? !this.order.down : column.name !== "title" };
        this.refresh();
        this.headings.querySelector(`[data-column="${CSS.escape(column.name)}"]`)?.focus();
      };
      const arrow = is ? (this.order.down ? " ▾" : " ▴") : "";
      return html("th", { scope: "col", "aria-sort": is ? (this.order.down ? "descending" : "ascending") : "none" },
        html("button", { type: "button", title: column.words ?? null, "data-column": column.name, onclick: sort }, column.heading + arrow));
    }));
  }

  // On paper nothing scrolls: the first rows, as many as a reader would turn pages for.
  drawRows(onPaper = false) {
    const first = onPaper ? 0 : Math.max(0, Math.floor(this.scroll.scrollTop / ROW) - SPARE);
    const last = Math.min(this.rows.length, onPaper ? PRINTED : first + Math.ceil((this.scroll.clientHeight || 420) / ROW) + 2 * SPARE);
    const columns = this.columns();
    const space = (count) => html("tr", { "aria-hidden": "true" }, html("td", { colspan: columns.length, style: null }));
    const shown = this.rows.slice(first, last).map((head) => {
      const row = html("tr", { "aria-selected": String(head === this.app.selected), "data-head": head, onclick: () => this.app.select(head) });
      for (const column of columns) {
        const value = column.of(head);
        row.append(html("td", {}, typeof value === "number" ? numberOf(column.quantity, value) : value));
      }
      return row;
    });
    const [above, below] = [space(), space()];
    above.firstChild.style.height = `${first * ROW}px`;
    below.firstChild.style.height = `${(this.rows.length - last) * ROW}px`;
    above.firstChild.style.padding = below.firstChild.style.padding = "0";
    this.body.replaceChildren(...(first ? [above] : []), ...shown, ...(last < this.rows.length ? [below] : []));
  }

  // What is copied: every number as the JSON has it, not as it is shown.
  records() {
    const { view, frame } = this.app;
    return this.rows.map((head) => ({ block: view.blocks[view.block[head]], layer: view.layer[head], head: view.head[head],
      ...Object.fromEntries(Object.keys(view.columns).map((name) => [name, view.value(name, frame, head)])), does: this.app.namesOf("does", head).join(", "), regime: this.app.namesOf("regime", head).join() }));
  }
}

// A column's heading in a condition, where blanks part conditions.
function asCondition(quantity) {
  return quantity.symbol.replaceAll(" ", "_");
}

// Conditions that this page's heads can meet.
function filterExample(app) {
  const number = app.shownQuantities()[0];
  return [app.view.has("does") ? "does=near" : "", number ? `${/^[\w ]+$/.test(number.symbol) ? asCondition(number) : number.name}>0.5` : "", "layer=3"].filter(Boolean).join(" ");
}
