// Elements of the page and of drawings. Words are always given as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function html(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

function text(words, x, y, attributes) {
  return svg("text", { x, y, ...attributes }, words);
}

// A choice of several, with its label.
function selection(id, words, options, chosen, action) {
  const list = html("select", { id, onchange: (event) => action(event.target.value) });
  for (const [value, label] of options) list.append(html("option", { value, selected: String(value) === String(chosen) }, label));
  return html("label", {}, words, list);
}

// Phrases as a sentence has them: one, two and three.
function listed(phrases) {
  return [phrases.slice(0, -1).join(", "), ...phrases.slice(-1)].filter(Boolean).join(" and ");
}
