// Colours that stay apart for colour-blind readers and in grey print: lightness runs one way, or both ways from the middle.

// In both themes that of the same plane as a picture (figures.py): dark is collapse.
const MAGMA = ["#000004", "#51127c", "#b73779", "#fc8961", "#fcfdbf"];
const RAMPS = {
  light: {
    sequential: ["#f6f2e4", "#a9d3cf", "#4b9dbb", "#22619a", "#1b2a63"],
    diverging: ["#7f3404", "#dd8a3f", "#f4f0e6", "#5ba0cf", "#0b437c"],
    magma: MAGMA,
  },
  dark: {
    sequential: ["#1c2733", "#215a80", "#3b9aa6", "#a5d493", "#fdf3c4"],
    diverging: ["#ffc183", "#b8671f", "#2b313a", "#2f79b3", "#9bd6ff"],
    magma: MAGMA,
  },
};
const LINE_LOOKS = {
  light: ["#0072b2", "#c24e00", "#007a59", "#a8487f", "#8a6100", "#2b7fa8"],
  dark: ["#5ab4f0", "#ff9350", "#3fd0a4", "#f09fcb", "#f0c040", "#9adcff"],
};
const DASHES = ["", "6 3", "2 2", "8 3 2 3", "12 4"];

function isDark() {
  return document.documentElement.dataset.theme === "dark";
}

function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

// The colour at a share from 0 to 1 of a ramp, as [r, g, b].
function ramp(kind, share) {
  const stops = RAMPS[isDark() ? "dark" : "light"][kind] ?? RAMPS[isDark() ? "dark" : "light"].sequential;
  const place = Math.min(1, Math.max(0, share)) * (stops.length - 1);
  const below = Math.min(Math.floor(place), stops.length - 2);
  const [from, to] = [channels(stops[below]), channels(stops[below + 1])];
  return from.map((value, n) => Math.round(value + (place - below) * (to[n] - value)));
}

// Black or white, whichever reads better on a colour.
function inkOn(hex) {
  const [r, g, b] = channels(hex);
  return 0.299 * r + 0.587 * g + 0.114 * b > 110 ? "#000" : "#fff";
}

function css(rgb) {
  return `rgb(${rgb.join(",")})`;
}

function look(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function lineLook(number) {
  const colours = LINE_LOOKS[isDark() ? "dark" : "light"];
  return { colour: colours[number % colours.length], dash: DASHES[Math.floor(number / colours.length) % DASHES.length] };
}

// Sets the theme; without a word the system's wish decides. Storage may be closed to a page in a frame.
function startTheme(redraw) {
  const root = document.documentElement;
  root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    redraw();
  });
  addEventListener("beforeprint", () => { root.dataset.theme = "light"; redraw(); });
}
