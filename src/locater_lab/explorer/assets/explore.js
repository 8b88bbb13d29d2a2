// The explorer: sliders, pictures, the plane and the story, drawn anew whenever a slider moves.

const SNAP = 7; // pixels of the plane
const KNOBS = [
  { name: "trace", snaps: true, words: "mean of the eigenvalues, as tr W/λ", low: -6, high: 6, bend: (value) => PLANE.bend * Math.sinh(value), back: (value) => Math.asinh(value / PLANE.bend) },
  { name: "deviation", snaps: true, words: "spread of the eigenvalues, as √d·σ/λ", low: 0.003, high: 6, bend: Math.exp, back: Math.log },
  { name: "symmetry", words: "symmetry tr W²/‖W‖² (1: symmetric, −1: rotates)", low: -1, high: 1, bend: (value) => Math.round(value * 100) / 100, back: (value) => value },
  { name: "temperature", words: "temperature, times the usual λ", low: 0.2, high: 5, bend: Math.exp, back: Math.log },
];

class Explorer {
  constructor(data) {
    this.data = data;
    this.plane = data.plane;
    this.grid = data.at(data.grid.values);
    this.heads = (data.heads ?? []).map(([title, trace, deviation, symmetry, width]) => ({ title, trace, deviation, symmetry, width }));
    this.knobs = { trace: 0, deviation: 0.004, symmetry: 1, temperature: 1, length: 64, base: 0, width: data.grid.width, layers: "" };
    this.reached = new Set();
    this.drawKnobs();
    startTheme(() => { this.drawColours(); this.draw(); });
    startExport(null);
    this.drawColours();
    this.begin(0);
    document.documentElement.dataset.ready = "yes";
  }

  begin(step) {
    this.step = step;
    document.getElementById("step-says").textContent = "";
    this.set({ symmetry: 1, temperature: 1, base: 0, length: 64, width: this.data.grid.width, ...STORY[step].start });
  }

  // A click on the plane: a head of the scan where one is near, with its own symmetry and width; else the place itself.
  jump(trace, deviation) {
    const near = this.nearest(trace, deviation);
    if (near && near.away < SNAP) return this.take(near.head);
    const clamp = (value, { low, high }) => Math.min(high, Math.max(low, value));
    return this.set({ trace: clamp(trace, KNOBS[0]), deviation: clamp(deviation, KNOBS[1]), temperature: 1 });
  }

  // The head of the scan that lies nearest on the plane, and how far away in the plane's own pixels.
  nearest(trace, deviation) {
    const at = planeAxes(this.plane);
    const here = inFrame(at, trace, deviation);
    const away = (head) => { const there = inFrame(at, head.trace, head.deviation); return Math.hypot(there.cx - here.cx, there.cy - here.cy); };
    return this.heads.reduce((best, head) => { const distance = away(head); return best && best.away <= distance ? best : { head, away: distance }; }, null);
  }

  // A slider released near a head snaps to it: mean, spread and symmetry.
  settle() {
    const { trace, deviation, temperature } = this.knobs;
    const near = this.nearest(trace / temperature, deviation / temperature);
    if (near && near.away < SNAP) this.take(near.head);
  }

  set(changes) {
    Object.assign(this.knobs, changes);
    this.at = changes.head ?? null;
    for (const knob of KNOBS) {
      const slider = document.getElementById(`knob-${knob.name}`);
      slider.value = knob.back(this.knobs[knob.name]);
      slider.setAttribute("aria-valuetext", shownNumber(this.knobs[knob.name]));
      document.getElementById(`value-${knob.name}`).textContent = shownNumber(this.knobs[knob.name]);
    }
    document.getElementById("knob-length").value = this.knobs.length;
    document.getElementById("knob-base").value = this.knobs.base;
    document.getElementById("knob-layers").value = this.knobs.layers;
    if (this.heads.length) document.getElementById("knob-head").value = this.at ? this.heads.indexOf(this.at) : "";
    this.draw();
  }

  drawKnobs() {
    const rows = KNOBS.map((knob) => {
      const move = (event) => this.set({ [knob.name]: knob.bend(Number(event.target.value)) });
      const slider = html("input", { type: "range", id: `knob-${knob.name}`, min: knob.back(knob.low), max: knob.back(knob.high), step: "any", oninput: move, onchange: () => knob.snaps && this.settle() });
      return html("label", {}, html("span", {}, knob.words), slider, html("output", { id: `value-${knob.name}` }));
    });
    const number = (name) => (value) => this.set({ [name]: Number(value) });
    const lengths = [8, 16, 32, 64, 128, 256, 512, 1024].map((length) => [length, length]);
    rows.push(selection("knob-length", "tokens T ", lengths, this.knobs.length, number("length")));
    rows.push(selection("knob-base", "rotary base ", [[0, "no rotary positions"], [100, "100"], [10000, "10,000"], [500000, "500,000"]], 0, number("base")));
    rows.push(selection("knob-layers", "layers (planes of entropy and distinctness) ", [["", "1 layer, simulated"], ...this.plane.deeper.map((plane, n) => [n, plane.title])], "", (value) => this.set({ layers: value })));
    if (this.heads.length) rows.push(selection("knob-head", "a head of the scan ", [["", "choose …"], ...this.heads.map((head, n) => [n, head.title])], "", (value) => value !== "" && this.take(this.heads[value])));
    document.getElementById("knobs").replaceChildren(...rows);
  }

  // The head's own three moments: the sliders may not reach all of them, the pictures do.
  take(head) {
    this.set({ trace: head.trace, deviation: head.deviation, symmetry: head.symmetry, width: head.width, temperature: 1, head });
  }

  draw() {
    const { knobs } = this;
    const positions = evenly(knobs.length, 97);
    const moments = toyMoments(knobs);
    const closed = closedForm(moments, knobs.length, 1, positions);
    const { attention, entropy } = softmaxOverWalks(knobs);
    const shown = knobs.base ? rotaryForm(moments, knobs.length, knobs.base, positions) : closed;
    this.now = { regime: regimeOf(shown, this.data.limits), localisation: localisation(shown), entropy };
    const exact = gridProfile(this.data.grid, this.grid, knobs);
    this.drawPictures(positions, { closed, shown, exact }, attention);
    this.drawVerdict(moments, exact);
    this.drawStep();
    const place = document.getElementById("planes");
    const deeper = knobs.layers === "" ? null : this.plane.deeper[knobs.layers];
    const whose = deeper ? `Theory of depth, ${deeper.title}` : "Simulated softmax";
    place.replaceChildren(theoryPlane(this),
      softmaxPlane(this, (deeper ?? this.plane).entropy, `${whose}: entropy`, "Near 0: all on one token, entropy collapse."),
      softmaxPlane(this, (deeper ?? this.plane).residual, `${whose}: how distinct tokens stay`, "Near 0: all tokens alike, rank collapse."));
  }

  drawPictures(positions, { closed, shown, exact }, attention) {
    const { knobs } = this;
    const series = [{ label: "closed form", points: onto(positions, closed), look: lineLook(0) }];
    if (exact) series.push({ label: `exact (± ${this.data.grid.error.toPrecision(2)})`, points: exact.map((value, n) => [1 + (n * (knobs.length - 1)) / (exact.length - 1), value]), look: lineLook(1) });
    if (knobs.base) series.push({ label: "rotary", points: onto(positions, shown), look: lineLook(2) });
    const profile = figure("Which tokens pass on a gradient (ρ)", series, { key: true, x: { range: [1, knobs.length], ticks: evenly(knobs.length, 5), label: "token t (the query is the last)" }, y: { range: [0, 1], label: "probability ρ" } });
    const bars = [{ label: `mean over ${WALKS.count} walks`, points: attention.map((value, t) => [t + 1, value]), look: lineLook(3) }];
    const top = Math.max(0.1, ...attention) * 1.05;
    const simulated = figure("True softmax on simulated walks", bars, { key: true, x: { range: [1, attention.length], ticks: [1, 16, 32, 48], label: "token t" }, y: { range: [0, top], label: "attention" } });
    document.getElementById("pictures").replaceChildren(profile, simulated);
  }

  drawVerdict(moments, exact) {
    const { regime, localisation: local, entropy } = this.now;
    const eta = Math.sqrt((moments.square + 2 * moments.norm) / 3);
    const words = this.data.regimes.find((one) => one.name === regime).meaning;
    const whose = this.at ? `Head ${this.at.title}, its own mean, spread and symmetry. ` : "";
    document.getElementById("verdict").textContent = `${whose}${regime}: ${words}. ξ = ${shownNumber(eta > 0 ? moments.trace / eta : 0)}, η/λ = ${shownNumber(eta)}, localisation L = ${local.toFixed(2)} (share of the context left out), softmax entropy ${entropy.toFixed(2)} (1: all alike). ${exact ? "" : `The exact ρ is not drawn: it is there for T = ${this.data.grid.lengths.join(" and ")}, symmetry 1 and no rotary positions, within the range of the sliders.`}`;
  }

  drawStep() {
    const goal = STORY[this.step];
    const first = !this.reached.has(this.step) && goal.done(this.now, this.knobs);
    if (first) this.reached.add(this.step);
    drawStory(this, document.getElementById("story"));
    const says = document.getElementById("step-says");
    if (first) says.textContent = `Step ${this.step + 1} reached${this.step < 5 ? ": go on to the next." : ": that was all."}`;
    document.getElementById("plane-says").textContent = `The ring is where the sliders stand. T = ${this.knobs.length}; the simulated planes were made with T = ${this.plane.length}, those of several layers with T = ${this.plane.deeper[0].length}.`;
  }

  drawColours() {
    const list = html("dl", {});
    for (const regime of this.data.regimes) {
      const swatch = html("span", { class: "swatch", "aria-hidden": "true" });
      swatch.style.background = regime.colour;
      list.append(html("dt", {}, swatch, regime.name), html("dd", {}, regime.meaning));
    }
    document.getElementById("colours").replaceChildren(list);
  }
}

readData().then((data) => { window.locater = { explorer: new Explorer(data), closedForm, rotaryForm, gridProfile, toyMoments, regimeOf, localisation }; });
