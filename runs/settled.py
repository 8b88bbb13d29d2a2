"""What the runs of runs/settle.py say: writes "At the end of training" in docs/reproduction.md with its figures, the
README's honest limit, and the advice at the top of docs/studies.md.

    python runs/settled.py [take OUT]

`take OUT` first copies the rows of ended runs from OUT/rows to runs/measured/settle. Everything else is recomputed from
these; nothing is claimed of fewer than three seeds.
"""

import json
import math
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from locater_lab.studies.page import BOX
from locater_lab.studies.runs import compare_all, read_runs
from locater_lab.studies.statistics import together
from locater_lab.train.metrics import read_metrics

sys.path.insert(0, str(Path(__file__).parent))
import settled_said as said  # noqa: E402
from settled_rows import (  # noqa: E402
    ENDS,
    KEPT,
    LOCATERS,
    SEEDS,
    STAGES,
    Arms,
    against_none,
    at_end,
    best_loss,
    best_ratio,
    end_ratio,
    gains,
    how_tuned,
    last_loss,
    levels,
    longer_ratio,
    moved,
    of_seeds,
    outcome,
    outcomes,
    rates,
    read,
    steps_ratio,
    tried,
)
from settled_said import ARMS, TUNED, Ratio  # noqa: E402

ROOT = Path(__file__).parents[1]
PAGE, README, STUDIES = ROOT / "docs" / "reproduction.md", ROOT / "README.md", ROOT / "docs" / "studies.md"
PICTURES = {"A": "reproduction_end.png", "A-20000": "reproduction_twice.png"}
BEGIN, END = "<!-- settled -->\n", "<!-- end of settled -->"
COSTS = {
    "tune": "strengths and rates at 2,000 steps",
    "rates": "rates at 10,000",
    "A": "A",
    "A-20000": "A at 20,000",
    "B": "B",
}
COSTS |= {"B-rates": "rates of B", "B-tuned": "B at these"}
SPECTRUM = {"entropy": "entropy", "trace_over_temperature": "tr W/λ", "eta_over_temperature": "η/λ"}
SPECTRUM |= {"localisation": "L"}


def table(arms: Arms, rate: Mapping[str, float]) -> list[str]:
    """Losses and ratios, steps to a fixed loss, and the spectrum at the end; means over seeds."""
    marks = levels(arms)
    heads = ["arm", "seeds", "rate", "loss at the end", "ratio to `none` at the end [95 %]", "at the best validation"]
    heads += [f"steps to `none`'s loss at {step:,}, ratio" for step, _ in marks]
    rows = [[*heads, *SPECTRUM.values()]]
    for arm, runs in arms.items():
        ratios = [end_ratio(arms, arm), best_ratio(arms, arm), *(steps_ratio(arms, arm, loss) for _, loss in marks)]
        cells = ["–" if arm == "none" else str(one) for one in ratios]
        ends = [run.validations[max(run.validations)] for run in runs.values()]
        numbers = [f"{fmean(end[name] for end in ends):.2f}" for name in SPECTRUM]
        loss = fmean(end["loss"] for end in ends)
        rows.append([f"`{arm}`", str(len(runs)), f"{rate[arm]:.2g}", f"{loss:.4f}", *cells, *numbers])
    rows.insert(1, ["---"] * len(rows[0]))
    return ["| " + " | ".join(row) + " |" for row in rows]


def answer(arms: Arms, how: str = TUNED) -> str:
    """The claim in a sentence: yes, early, or no; of no arm with fewer than three seeds."""
    found = outcome(arms, how)
    if not found.word:
        return "**There is no answer yet**: no form of LocAteR has three seeds beside `none`."
    _, ends, early, _ = found
    shown = together([f"{ratio} with {ARMS[arm]}{ratio.shown_p}" for arm, ratio in ends.items()])
    sooner = together([f"{ratio} with {ARMS[arm]}" for arm, ratio in early.items()])
    step = levels(arms)[0][0]
    return (
        f"**{found.answer}.** At the end of training the perplexity is {shown}, of that of `none` "
        f"({_judged(ends, how)}). "
        f"The loss that `none` has at step {step:,} is reached in {sooner}, of its steps."
    )


def _judged(ends: Mapping[str, Ratio], how: str) -> str:
    counts = sorted({ratio.estimate.count for ratio in ends.values()})
    return f"{' and '.join(map(str, counts))} seeds, paired, Holm, {how}"


def localises(arms: Arms) -> str:
    """Compare tr W/λ and L of free and held heads at the end."""
    told = [arm for arm in LOCATERS if end_ratio(arms, arm).is_claimed]
    parts = []
    for name, symbol, unit in (("trace_over_temperature", "tr W", " λ"), ("localisation", "L", "")):
        means = {arm: fmean(at_end(run, name) for run in arms[arm].values()) for arm in ("none", *told)}
        changes = {arm: against_none(arms, arm, lambda run, name=name: at_end(run, name)) for arm in told}
        others = together([f"{means[arm]:.2f}{unit} with {ARMS[arm]} ({changes[arm]})" for arm in told])
        parts.append(f"{symbol} ends at {means['none']:.2f}{unit} without LocAteR, and at {others}")
    return "; ".join(parts) + "." if told else ""


def course(arms: Arms) -> str:
    """Ratios of perplexities at the first validation, in the middle and at the end, of the forms that are claimed."""
    told = [arm for arm in LOCATERS if end_ratio(arms, arm).is_claimed]
    steps = sorted(set.intersection(*(set(run.validations) for runs in arms.values() for run in runs.values())))
    parts = []
    for step in dict.fromkeys((steps[0], steps[len(steps) // 2], steps[-1])):
        at = {arm: Ratio(against_none(arms, arm, lambda run, at=step: run.validations[at]["loss"])) for arm in told}
        parts.append(f"{together([f'{ratio} with {ARMS[arm]}' for arm, ratio in at.items()])} at step {step:,}")
    return f"Over the run the ratio is {', '.join(parts)} (each interval alone)." if told else ""


def turns(arms: Arms) -> str:
    """Tell whether the validation of `none` turns up before the end."""
    runs = arms.get("none", {})
    up = [seed for seed, run in runs.items() if best_loss(run) < last_loss(run)]
    return f"The validation loss of `none` turned up before its end on {len(up)} of {len(runs)} seeds."


OPENING = """Two epochs are a start. `runs/settle.py` asks about the end: 2,048 byte pairs, fairseq's gain, a cosine to
2 % over 10,000 steps, four arms (`none`, κ held, κ released by a quarter of the run, weight decay on queries and keys),
five seeds; then words. Every arm of byte pairs has its own strength and rate, tuned on seed 100, which is not judged;
words take these strengths. A ratio is that of perplexities, with an interval of 95 %, paired by seed; of fewer than
three seeds there is none."""
WORDS = "Words (33,278), dropout 0.1, decoupled decay 0.01, four epochs of a cosine:"


def tuning(kept: Path = KEPT) -> str:
    """Losses of the unjudged seed at A's length and at B's, by arm and rate."""
    titles = {"rates": "Rates of byte pairs at 10,000 steps", "B-rates": "Rates of words"}
    parts = []
    for part, title in titles.items():
        shown = {
            arm: ", ".join(f"{loss:.4f} ({rate})" for rate, loss in losses.items())
            for arm, losses in tried(part, kept).items()
        }
        told = "; ".join(f"`{arm}` {losses}" for arm, losses in shown.items())
        parts += [f"{title}, on the seed that is not judged, loss (rate): {told}."] if told else []
    return "\n\n".join(parts)


SHORT_TUNING = """Rates of short runs mislead ([rows](../runs/measured/settle/tune), 2,000 steps, the same seed). There
the arms end within {spread:.2f} of each other at their best rates, loss (rate): {best}. At these rates 10,000 steps
end at {ends} ([rows](../runs/measured/settle/A-rates-of-2000-steps), one seed). So rates are chosen at 10,000 steps."""


def short_tuning(kept: Path = KEPT) -> str:
    """What tuning on 2,000 steps would have chosen, and what came of it at 10,000."""
    losses = {arm: min((loss, rate) for rate, loss in found.items()) for arm, found in tried("tune", kept).items()}
    chosen = kept / "A-rates-of-2000-steps"
    if not losses or not chosen.exists():
        return ""
    spread = max(losses.values())[0] - min(losses.values())[0]
    best = together([f"`{arm}` {loss:.3f} ({rate})" for arm, (loss, rate) in losses.items()])
    runs = {run.arm: last_loss(run) for run in read_runs(chosen) if ENDS["A"] in run.validations}
    ends = together([f"{runs[arm]:.3f} (`{arm}`)" for arm in ("none", *ARMS) if arm in runs])
    return SHORT_TUNING.format(spread=spread, best=best, ends=ends)


def floors(stage: str) -> list[str]:
    """Losses of tables that were counted from the training text."""
    if not (KEPT / "floors.json").exists():
        return []
    kept = json.loads((KEPT / "floors.json").read_text(encoding="utf-8"))[stage[0]]
    tables = f"{kept['unigram']:.3f} for single tokens, {kept['bigram']:.3f} for pairs"
    return ["", f"Floors, of tables counted from the training text (`python runs/settled_floors.py DATA`): {tables}."]


LONGER = """Twice the length (`python runs/settle.py DATA OUT --arms none,held --until A --steps 20000`, with the kept
rows of `tune` and `rates` copied to OUT/rows), `none` and the best arm of A, at the strengths and rates above:"""
WORDS_NOT_RUN = """Tuned rates of the words were not afforded: {ended} of the six runs on the tuning seed has ended.
`python runs/settle.py DATA OUT`, with the kept rows copied to OUT/rows, runs the others (16 minutes each, on a core of
its own) and judges an arm anew whose best is another rate. `python runs/settled.py take OUT` writes it here."""


def words_untuned(kept: Path = KEPT) -> str:
    """What is missing before the rates of the words are tuned; nothing once they are."""
    ended = sum(map(len, tried("B-rates", kept).values()))
    return "" if how_tuned("B", kept) == TUNED else WORDS_NOT_RUN.format(ended=ended or "none")


def summary(kept: Path = KEPT) -> list[str]:
    """The answers beside each other, and the size of gain that they rule out."""
    found = outcomes(kept)
    rows = [["", "ratio to `none` at the end [95 %]", "seeds", "does LocAteR lead?"], ["---"] * 4]
    for name, what in (("end", "byte pairs"), ("longer", "byte pairs"), ("words", "words")):
        one = found[name]
        if one.word:
            ratio, steps = one.ends[one.best], ENDS[{"end": "A", "longer": "A-20000", "words": "B"}[name]]
            cells = [f"{ratio} with {ARMS[one.best]}", str(ratio.estimate.count), one.answer + ratio.shown_p]
            rows.append([f"{what}, {steps:,} steps", *cells])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lowest = min((math.exp(one.ends[one.best].estimate.low) for one in found.values() if one.word), default=0.0)
    bound = f"No interval reaches below {lowest:.3f}: a gain of {100 * (1 - lowest):.1f} % or more is ruled out here."
    return [*lines, "", bound, ""] if lowest and lowest < 1 else [*lines, ""] if len(rows) > 2 else []


def longer(kept: Path = KEPT) -> str:
    """What twice the steps change: how far `none` still falls, and whether the ratio moves."""
    short, long = read("A", kept), read("A-20000", kept)
    falls = longer_ratio(short, long, "none")
    if not falls.is_claimed:
        return ""
    parts = [f"Twice the steps bring `none` to {falls} of its perplexity ({falls.estimate.count} seeds, paired)"]
    parts[0] += ": 10,000 were no convergence." if falls.word == "lower" else "."
    for arm in LOCATERS:
        if (change := moved(short, long, arm)).is_claimed:
            shared = long[arm].keys() & long["none"].keys()
            before, after = (end_ratio(of_seeds(arms, shared), arm) for arms in (short, long))
            verdict = {"lower": "it falls", "higher": "it rises", "": "no change is seen"}[change.word]
            alone = together([f"{math.exp(one):.4f}" for one in gains(long, arm).values()])
            parts.append(
                f"The ratio with {ARMS[arm]} is {before} at 10,000 steps on these seeds, and {after} at 20,000 "
                f"({alone} seed by seed): {verdict} (the one over the other {change})."
            )
    return " ".join(parts)


def budgets(kept: Path = KEPT) -> str:
    """The losses of `none` by the length of its schedule."""
    ends = tried("tune", kept).get("none", {})
    losses = {2000: min(ends.values())} if ends else {}
    for stage in ("A", "A-20000"):
        if runs := read(stage, kept).get("none"):
            losses[ENDS[stage]] = fmean(map(last_loss, runs.values()))
    if len(losses) < 2:
        return ""
    told = together([f"{loss:.3f} in {steps:,} steps" for steps, loss in losses.items()])
    falls = list(losses.values()) == sorted(losses.values(), reverse=True)
    return f"By the length of its schedule `none` ends at {told}" + (": it still falls." if falls else ".")


def cost(kept: Path = KEPT) -> str:
    """Core-hours of training by stage, from the speeds that the rows have; every run has one thread."""
    told = []
    for stage in STAGES:
        hours = sum(map(_hours, (kept / stage).glob("*/metrics.jsonl")))
        told += [f"{COSTS[stage]} {hours:.1f}"] if hours else []
    return f"Core-hours of training, on a machine whose load varied: {together(told)}." if told else ""


def _hours(path: Path) -> float:
    rows = [row for row in read_metrics(path) if "tokens_per_second" in row]
    before = [0, *(row["tokens"] for row in rows)]
    return (
        sum((row["tokens"] - last) / row["tokens_per_second"] for row, last in zip(rows, before, strict=False)) / 3600
    )


def section(kept: Path = KEPT) -> str:
    """All of it, from the rows."""
    parts = [OPENING, "", "`python runs/settled.py`", "", *summary(kept)]
    for stage, title in (("A", "A. Byte pairs:"), ("A-20000", LONGER), ("B", f"B. {WORDS}")):
        arms = read(stage, kept)
        told = _stage(stage, arms, kept) if arms else ["Not afforded: none of these runs has ended."]
        parts += [title, "", *told, ""]
    texts = (tuning(kept), short_tuning(kept), budgets(kept), cost(kept), words_untuned(kept))
    parts += [part for text in texts if text for part in (text, "")]
    for stage, picture in PICTURES.items():
        if arms := read(stage, kept):
            shown = f"{len(arms)} arms, {ENDS[stage]:,} steps: perplexity, entropy and spectrum"
            parts += [f"![{shown}]({picture})", ""]
    return "\n".join(parts)


def _stage(stage: str, arms: Arms, kept: Path) -> list[str]:
    missing = {arm: SEEDS[stage] - len(arms.get(arm, {})) for arm in (("none", *ARMS) if stage == "A" else arms)}
    open_ones = together([f"`{arm}` {count}" for arm, count in missing.items() if count > 0])
    lines = [answer(arms, how_tuned(stage, kept)), "", *table(arms, rates(stage, kept)), ""]
    change = longer(kept) if stage == "A-20000" else ""
    lines += [part for text in (change, course(arms), localises(arms)) if text for part in (text, "")]
    lines += [turns(arms), *floors(stage)]
    return [*lines, "", f"Seeds that have not ended: {open_ones}."] if open_ones else lines


def between(text: str, begin: str, end: str, new: str) -> str:
    """The text with what stands between two marks exchanged."""
    before, begin, rest = text.partition(begin)
    _, end, after = rest.partition(end)
    assert begin and end, "the marks are gone"
    return before + begin + new + end + after


def take(out: Path) -> None:
    """Copy the rows of ended runs."""
    for path in sorted((out / "rows").glob("*/*/metrics.jsonl")):
        target = KEPT / path.parent.parent.name / path.parent.name / path.name
        if path.parent.parent.name in STAGES:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def draw(stage: str) -> None:
    from locater.report import figures
    from locater.report.curves import curves

    runs = [run for some in read(stage).values() for run in some.values()]
    figures.save(curves(compare_all(runs, folder=stage, against="none")), PAGE.with_name(PICTURES[stage]))


def main() -> None:
    if sys.argv[1:2] == ["take"]:
        take(Path(sys.argv[2]))
    exchange(PAGE, BEGIN, END, f"\n{section()}\n")
    found = outcomes()
    exchange(README, said.LIMIT, "\n\n", said.limit(**found).removeprefix(said.LIMIT))
    exchange(STUDIES, BOX, "\n\n", said.advice(found["end"], found["longer"]))
    for stage in PICTURES:
        if "none" in read(stage):
            draw(stage)


def exchange(path: Path, begin: str, end: str, new: str) -> None:
    path.write_text(between(path.read_text(encoding="utf-8"), begin, end, new), encoding="utf-8")


if __name__ == "__main__":
    main()
