// Files out of the page: figures as SVG and PNG, rows as CSV and JSON, or onto the clipboard.

function download(name, content, type) {
  const address = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  const link = html("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function fileName(title, suffix) {
  return `${title.normalize("NFKD").replace(/[^A-Za-z0-9]+/g, "-").replace(/^-|-$/g, "").toLowerCase().slice(0, 60) || "figure"}.${suffix}`;
}

// A figure that the menu offers: its element on the page, its title, and what draws it.
const exportable = new Map();

function offer(element, title, svgOf) {
  exportable.set(element, { title, svgOf });
  return element;
}

// One menu for the whole page, filled when it is opened: figures that are on the page then, and the rows of the table.
function startExport(table) {
  const menu = document.getElementById("export");
  menu?.addEventListener("toggle", () => menu.open && document.getElementById("export-list").replaceChildren(...exportRows(table)));
}

function exportRows(table) {
  for (const element of exportable.keys()) if (!element.isConnected) exportable.delete(element);
  const button = (title, words, action) => html("button", { type: "button", class: "save", "aria-label": `${title}: ${words}`, onclick: action }, words);
  const row = (title, ...buttons) => html("div", { class: "export-row" }, html("span", {}, title), html("span", { class: "group" }, ...buttons));
  const rows = Array.from(exportable.values(), ({ title, svgOf }) => row(title,
    button(title, "SVG", () => download(fileName(title, "svg"), serialised(svgOf()), "image/svg+xml")),
    button(title, "PNG", async () => download(fileName(title, "png"), await asPng(svgOf())))));
  if (!table) return rows;
  const file = (suffix, content, type) => button("Table of heads", suffix.toUpperCase(), () => download(`heads.${suffix}`, content(table.records()), type));
  const copied = (words, content) => button("Table of heads", words, async () => { await copy(content(table.records())); table.says.textContent = `${words}: done`; });
  return [...rows, row("Table of heads", file("csv", asCsv, "text/csv"), file("json", asJson, "application/json"), copied("copy CSV", asCsv), copied("copy JSON", asJson))];
}

function serialised(element) {
  const copy = element.cloneNode(true);
  copy.querySelectorAll(".here").forEach((mark) => mark.remove());
  copy.setAttribute("xmlns", SVG);
  const [, , width, height] = copy.getAttribute("viewBox").split(" ");
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  return new XMLSerializer().serializeToString(copy);
}

// Three times the size of the drawing, for print.
async function asPng(element) {
  const [, , width, height] = element.getAttribute("viewBox").split(" ").map(Number);
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(serialised(element))}`;
  await image.decode();
  const canvas = html("canvas", { width: width * 3, height: height * 3 });
  canvas.getContext("2d").drawImage(image, 0, 0, width * 3, height * 3);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

// A cell that a spreadsheet would run is written with an apostrophe before it; numbers are no such cells.
function csvCell(value) {
  if (typeof value === "number") return Number.isFinite(value) ? String(value) : "";
  const plain = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\n\r]/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
}

function asCsv(rows) {
  if (!rows.length) return "";
  const names = Object.keys(rows[0]);
  return [names, ...rows.map((row) => names.map((name) => row[name]))].map((cells) => cells.map(csvCell).join(",")).join("\r\n") + "\r\n";
}

function asJson(rows) {
  const known = (value) => (typeof value === "number" && !Number.isFinite(value) ? null : value);
  return JSON.stringify(rows.map((row) => Object.fromEntries(Object.entries(row).map(([name, value]) => [name, known(value)]))), null, 1);
}

async function copy(content) {
  try {
    await navigator.clipboard.writeText(content);
  } catch { // frames and old browsers: through a field that is selected
    const field = html("textarea", { "aria-hidden": "true" });
    field.value = content;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
}
