// Six steps for a first meeting with the theory; each has a goal that the page checks.

const STORY = [
  { title: "Everything is heard", words: "Mean and spread are both tiny. All logits are nearly equal, so attention is an average: every token is heard alike, and after a few layers all tokens look the same. That is the way to rank collapse.",
    start: { trace: 0, deviation: 0.004 }, ask: "Nothing to do: look at the flat line.", done: (now) => now.regime === "uniform" },
  { title: "Make attention collapse", words: "Now turn up the spread. Logits become large and random. On each walk softmax puts nearly everything on one token, another one each time, so the plot, a mean over walks, stays broad: the entropy tells. Few tokens pass on a gradient, and learning stalls: entropy collapse.",
    start: { trace: 0, deviation: 0.004 }, ask: "Turn the spread up until the softmax entropy is near 0.", done: (now) => now.regime === "no-signal" || now.entropy < 0.25 },
  { title: "Now localise it", words: "Take the spread back, and give the eigenvalues a mean instead: tokens that are alike attract each other. On a walk the recent tokens are the most alike.",
    start: { trace: 0, deviation: 0.05 }, ask: "Keep the spread small and turn the mean up, to about 0.3.", done: (now) => now.regime === "late" && now.entropy > 0.3 },
  { title: "Choose the window", words: "Go on with the mean. Beyond tr W = 2λ the last tokens saturate and a window in the middle remains: the theory calls it middle. The true softmax only sharpens: its entropy falls, and beyond tr W = λ it is on very few tokens.",
    start: { trace: 0.3, deviation: 0.05 }, ask: "Turn the mean beyond 2.", done: (now) => now.regime === "middle" },
  { title: "Look back", words: "A negative mean makes like tokens repel: now the early ones are heard.",
    start: { trace: 0.3, deviation: 0.05 }, ask: "Turn the mean below zero, to about −0.3.", done: (now) => now.regime === "early" },
  { title: "What LocAteR does", words: "Suppose a trained head has too large a spread. LocAteR shrinks η. With the mean held, as here, only the spread can fall; else the mean is free. Watch the point go straight down into the localised region.",
    start: { trace: 0.3, deviation: 2.5 }, ask: "Leave the mean; turn the spread down until the head is localised.", done: (now, knobs) => now.regime === "late" && Math.abs(knobs.trace - 0.3) < 0.05 },
];

// The steps in a row, the words of the open one beneath, and the way on once its goal is reached.
function drawStory(explorer, place) {
  const focused = place.contains(document.activeElement);
  place.replaceChildren(...STORY.map((step, n) => {
    const button = html("button", { type: "button", "aria-pressed": String(explorer.step === n), onclick: () => explorer.begin(n) }, `${n + 1}. ${step.title}`);
    return html("li", {}, button, html("span", { class: "mark", id: `mark-${n}` }, explorer.reached.has(n) ? " ✓ done" : ""));
  }));
  if (focused) place.querySelectorAll("button")[explorer.step].focus();
  const { words, ask } = STORY[explorer.step];
  const on = explorer.reached.has(explorer.step) && explorer.step < STORY.length - 1;
  document.getElementById("step-words").replaceChildren(words, html("strong", {}, ` ${ask} `),
    on ? html("button", { type: "button", id: "next-step", onclick: () => { explorer.begin(explorer.step + 1); place.querySelectorAll("button")[explorer.step].focus(); } }, "next step →") : "");
}
