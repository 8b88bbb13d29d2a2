"""What the runs of runs/settle.py say: writes "At the end of training" in docs/reproduction.md with its figures, the
README's honest limit, and the advice at the top of docs/studies.md.

    python runs/settled.py [take OUT]

`take OUT` first copies the rows of OUT to runs/measured/settle. Everything else is recomputed from these; only runs at
their schedule's end are judged, and nothing is claimed of fewer than three seeds.
"""

import json
import math
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from locater_lab.studies.page import BOX
from locater_lab.studies.runs import compare_all
from locater_lab.studies.statistics import together

sys.path.insert(0, str(Path(__file__).parent))
import settled_said as said  # noqa: E402
from settled_cost import budgets, cost, precision, short_tuning, tuning, words_untuned  # noqa: E402
from settled_rows import (  # noqa: E402
    ENDS,
    JUDGED,
    KEPT,
    LOCATERS,
    SEEDS,
    STAGES,
    Arms,
    against_none,
    at_end,
    begun_runs,
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
)
from settled_said import ARMS, TUNED, Ratio  # noqa: E402

ROOT = Path(__file__).parents[1]
PAGE, README, STUDIES = ROOT / "docs" / "reproduction.md", ROOT / "README.md", ROOT / "docs" / "studies.md"
PICTURES = {"A": "reproduction_end.png", "A-20000": "reproduction_twice.png"}
BEGIN, END = "<!-- settled -->\n", "<!-- end of settled -->"
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
        alone = together([f"{_by_seed(arms, arm)} with {ARMS[arm]}" for arm in LOCATERS if gains(arms, arm)])
        shown = f" Seed by seed the ratio is {alone}, which claims nothing." if alone else ""
        return f"**There is no answer yet**: no form of LocAteR has three seeds, and `none` the same.{shown}"
    _, ends, early, _ = found
    shown = together([f"{ratio} with {ARMS[arm]}{ratio.shown_p}" for arm, ratio in ends.items()])
    sooner = together([f"{ratio} of the steps with {ARMS[arm]}" for arm, ratio in early.items()])
    step = levels(arms)[0][0]
    return (
        f"**{found.answer}.** At the end of training the perplexity over that of `none` is {shown} "
        f"({_judged(ends, how)}). "
        f"To come to the loss that `none` has at step {step:,} takes {sooner}."
    )


def _by_seed(arms: Arms, arm: str) -> str:
    return together([f"{math.exp(one):.4f}" for one in gains(arms, arm).values()])


def _judged(ends: Mapping[str, Ratio], how: str) -> str:
    counts = sorted({ratio.estimate.count for ratio in ends.values()})
    return f"{' and '.join(map(str, counts))} seeds, paired, {how}; Holm's correction"


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
        parts.append(f"step {step:,}: {together([f'{ratio} with {ARMS[arm]}' for arm, ratio in at.items()])}")
    return f"Ratios over the run, each interval taken alone: {'; '.join(parts)}." if told else ""


def turns(arms: Arms) -> str:
    """Tell whether the validation of `none` turns up before the end."""
    runs = arms["none"]
    up = [seed for seed, run in runs.items() if best_loss(run) < last_loss(run)]
    return f"The validation loss of `none` turned up before its end on {len(up)} of {len(runs)} seeds."


OPENING = """Two epochs are a start. `runs/settle.py` asks about the end: 2,048 byte pairs, fairseq's gain, a cosine to
2 % over 10,000 steps, four arms (`none`, κ held, κ released by a quarter of the run, weight decay on queries and keys),
five seeds; then words. Every arm of byte pairs has its own strength and rate, tuned on seed 100, which is not judged;
words take these strengths. Matrix products are in bfloat16 where nothing else is said. A ratio is that of perplexities,
with an interval of 95 %, paired by seed; of fewer than three seeds there is none."""
WORDS = "Words (33,278), dropout 0.1, decoupled decay 0.01, four epochs of a cosine:"


def floors(stage: str) -> list[str]:
    """Losses of tables that were counted from the training text."""
    if not (KEPT / "floors.json").exists():
        return []
    kept = json.loads((KEPT / "floors.json").read_text(encoding="utf-8"))[stage[0]]
    tables = f"{kept['unigram']:.3f} for single tokens, {kept['bigram']:.3f} for pairs"
    return ["", f"Floors, of tables counted from the training text (`python runs/settled_floors.py DATA`): {tables}."]


LONGER = """A over 20,000 steps: `none` and the best arm, three seeds, at the strengths and rates that were tuned for
10,000. Matrix products are in float32 here, for want of a processor with fast bfloat16; both arms of a length have the
same precision, the two lengths do not. The command, with the kept rows of `tune` and `rates` copied to OUT/rows:
`python runs/settle.py DATA OUT --arms none,held --until A --steps 20000 --precision float32`."""


def summary(kept: Path = KEPT) -> list[str]:
    """The answers beside each other, and the size of gain that they rule out."""
    found = outcomes(kept)
    rows = [["", "ratio to `none` at the end [95 %]", "seeds", "is a lead of LocAteR seen?"], ["---"] * 4]
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
    parts = [f"Twice the steps, and float32, bring `none` to {falls} of its perplexity (paired by seed)"]
    parts[0] += ": 10,000 were no convergence." if falls.word == "lower" else "."
    for arm in LOCATERS:
        if (change := moved(short, long, arm)).is_claimed:
            shared = long[arm].keys() & long["none"].keys()
            before, after = (end_ratio(of_seeds(arms, shared), arm) for arms in (short, long))
            verdict = {"lower": "it falls", "higher": "it rises", "": "no change is seen"}[change.word]
            parts.append(
                f"The ratio with {ARMS[arm]} is {before} at 10,000 steps on these seeds, and {after} at 20,000 "
                f"({_by_seed(long, arm)} seed by seed): {verdict} (the one over the other {change})."
            )
    return " ".join(parts)


def section(kept: Path = KEPT) -> str:
    """All of it, from the rows."""
    parts = [OPENING, "", "`python runs/settled.py`", "", *summary(kept)]
    for stage, title in (
        ("A", "A. Byte pairs, 10,000 steps:"),
        ("A-20000", f"{LONGER}\n{precision(kept)}".rstrip()),
        ("B", f"B. {WORDS}"),
    ):
        parts += [title, "", *_stage(stage, read(stage, kept), kept), *open_seeds(stage, kept), ""]
    texts = (tuning(kept), short_tuning(kept), budgets(kept), cost(kept), words_untuned(kept))
    parts += [part for text in texts if text for part in (text, "")]
    for stage, picture in PICTURES.items():
        if "none" in (arms := read(stage, kept)):
            shown = f"{together(list(arms))} over {ENDS[stage]:,} steps: perplexity, entropy and spectrum"
            parts += [f"![{shown}]({picture})", ""]
    return "\n".join(parts)


def _stage(stage: str, arms: Arms, kept: Path) -> list[str]:
    if "none" not in arms:
        return ["Not afforded: no run of `none` has ended."]
    change = longer(kept) if stage == "A-20000" else ""
    lines = [answer(arms, how_tuned(stage, kept)), "", *table(arms, rates(stage, kept)), ""]
    lines += [part for text in (change, course(arms), localises(arms)) if text for part in (text, "")]
    return [*lines, turns(arms), *floors(stage)]


def open_seeds(stage: str, kept: Path = KEPT) -> list[str]:
    """How many seeds of each arm are missing, and where those that were begun stand."""
    arms = read(stage, kept)
    missing = {arm: SEEDS[stage] - len(arms.get(arm, {})) for arm in JUDGED[stage]}
    if not any(count > 0 for count in missing.values()):
        return []
    counts = together([f"`{arm}` {count}" for arm, count in missing.items() if count > 0])
    begun = [f"`{name}` is at step {step:,}" for name, step in begun_runs(stage, kept).items()]
    return ["", f"Seeds that have not ended: {counts}" + (f" ({together(begun)})." if begun else ".")]


def between(text: str, begin: str, end: str, new: str) -> str:
    """The text with what stands between two marks exchanged."""
    before, begin, rest = text.partition(begin)
    _, end, after = rest.partition(end)
    assert begin and end, "the marks are gone"
    return before + begin + new + end + after


def take(out: Path) -> None:
    """Copy the rows of runs: of those on their way what is new, of ended ones all."""
    for path in (path for part in ("runs", "rows") for path in sorted((out / part).glob("*/*/metrics.jsonl"))):
        stage, run = path.parts[-3:-1]
        target = KEPT / stage / run / path.name
        known = target.stat().st_size if target.exists() else 0
        if stage in STAGES and (path.is_relative_to(out / "rows") or path.stat().st_size > known):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def draw(stage: str) -> None:
    from locater.report import figures
    from locater.report.curves import curves

    runs = [run for some in read(stage).values() for run in some.values()]
    document = compare_all(runs, folder=stage, against="none")
    figures.save(curves(document, beside=list(ARMS)), PAGE.with_name(PICTURES[stage]))


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
