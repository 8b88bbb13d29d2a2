"""What the runs of runs/settle.py say: writes "At the end of training" in docs/reproduction.md with its figure, the
README's honest limit, and the advice at the top of docs/studies.md.

    python runs/settled.py [take OUT]

`take OUT` first copies the rows of ended runs from OUT/rows to runs/measured/settle. Everything else is recomputed from
these; nothing is claimed of fewer than three seeds.
"""

import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean

from locater_lab.studies.page import BOX
from locater_lab.studies.runs import Run, compare_all, read_runs
from locater_lab.studies.statistics import MeanEstimate, holm, paired, together
from locater_lab.train.metrics import read_metrics

sys.path.insert(0, str(Path(__file__).parent))
import settled_said as said  # noqa: E402
from settle import LENGTHS, WORD_RATES  # noqa: E402
from settled_said import ARMS, EARLY, NOT_SURE, TUNED, UNTUNED, Outcome, Ratio  # noqa: E402

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "runs" / "measured" / "settle"
STAGES = ("tune", "rates", "A", "A-20000", "B-rates", "B-tuned", "B")
PAGE, README, STUDIES = ROOT / "docs" / "reproduction.md", ROOT / "README.md", ROOT / "docs" / "studies.md"
PICTURE = "reproduction_end.png"
BEGIN, END = "<!-- settled -->\n", "<!-- end of settled -->"
LOCATERS = ("held", "released")
COSTS = {
    "tune": "strengths and rates at 2,000 steps",
    "rates": "rates at 10,000",
    "A": "A",
    "A-20000": "A at 20,000",
    "B": "B",
}
COSTS |= {"B-rates": "rates of B", "B-tuned": "B at these"}
SEEDS = {"A": 5, "A-20000": 3, "B": 3}
ENDS = {
    "A": int(LENGTHS["A"]),
    "A-20000": 20_000,
    "B": 4079,
}  # four epochs of the words, whose last batch ends one step before the cosine
LEVELS = (0.3, 0.8)  # of the run: the losses of `none` there are the ones that the others' steps are counted to
SPECTRUM = {"entropy": "entropy", "trace_over_temperature": "tr W/λ", "eta_over_temperature": "η/λ"}
SPECTRUM |= {"localisation": "L"}

Arms = dict[str, dict[int, Run]]  # by arm and seed


def read(stage: str, kept: Path = KEPT) -> Arms:
    """The runs of a stage that are at their schedule's end; of an arm of B that has a better rate, the runs at that."""
    found: Arms = {}
    for part in (stage, f"{stage}-tuned"):
        ended: Arms = {}
        for run in read_runs(kept / part) if any((kept / part).glob("*/metrics.jsonl")) else []:
            if ENDS[stage] in run.validations:
                ended.setdefault(run.arm, {})[run.seed] = run
        found |= ended
    return {arm: found[arm] for arm in ("none", *ARMS) if arm in found}


def how_tuned(stage: str, arms: Arms, kept: Path = KEPT) -> str:
    """Tell whether the rates of a stage were tuned: A's were, B's once every arm has each rate on the tuning seed."""
    if stage == "A-20000":
        return said.TUNED_SHORTER
    missing = [
        arm
        for arm in arms
        for rate in WORD_RATES
        if not (kept / "B-rates" / f"{arm}-{rate:g}" / "metrics.jsonl").exists()
    ]
    return TUNED if stage == "A" or arms and not missing else UNTUNED


def last_loss(run: Run) -> float:
    return run.validations[max(run.validations)]["loss"]


def best_loss(run: Run) -> float:
    return min(row["loss"] for row in run.validations.values())


def steps_to(run: Run, level: float) -> float:
    """Step at which the validation loss first reaches a level, between two validations by a line; NaN if never."""
    before: tuple[int, float] | None = None
    for step, row in sorted(run.validations.items()):
        if row["loss"] <= level:
            if before is None or before[1] <= level:
                return float(step)
            share = (before[1] - level) / (before[1] - row["loss"])
            return before[0] + share * (step - before[0])
        before = step, row["loss"]
    return math.nan


def against_none(arms: Arms, arm: str, quantity: Callable[[Run], float]) -> MeanEstimate:
    """Paired difference to `none`, seed by seed; seeds without a number are left out."""
    values = ({seed: quantity(run) for seed, run in arms.get(name, {}).items()} for name in (arm, "none"))
    ours, theirs = ({seed: one for seed, one in some.items() if math.isfinite(one)} for some in values)
    return paired(ours, theirs)


def end_ratio(arms: Arms, arm: str) -> Ratio:
    return Ratio(against_none(arms, arm, last_loss))


def best_ratio(arms: Arms, arm: str) -> Ratio:
    return Ratio(against_none(arms, arm, best_loss))


def levels(arms: Arms) -> list[tuple[int, float]]:
    """Steps near the chosen shares of the run, and the mean loss that `none` has there."""
    runs = list(arms.get("none", {}).values())
    if not runs:
        return []
    steps = sorted(set.intersection(*(set(run.validations) for run in runs)))
    chosen = [min(steps, key=lambda step: abs(step - share * steps[-1])) for share in LEVELS]
    return [(step, fmean(run.validations[step]["loss"] for run in runs)) for step in chosen]


def steps_ratio(arms: Arms, arm: str, level: float) -> Ratio:
    return Ratio(against_none(arms, arm, lambda run: math.log(steps_to(run, level))))


def rates(stage: str, kept: Path = KEPT) -> dict[str, float]:
    """By arm, the highest rate of its runs."""
    found: dict[str, float] = {}
    for path in sorted((kept / stage).glob("*-seed*/metrics.jsonl")):
        arm = path.parent.name.rpartition("-seed")[0]
        rows = [row["learning_rate"] for row in read_metrics(path) if "learning_rate" in row]
        found[arm] = max([*rows, found.get(arm, 0.0)])
    return found


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


def outcome(arms: Arms, how: str = TUNED) -> Outcome:
    """Judge the forms of LocAteR that have three seeds, with Holm's correction over them."""
    ends = _together({arm: end_ratio(arms, arm) for arm in LOCATERS if arm in arms})
    if not ends:
        return Outcome()
    early = _together({arm: steps_ratio(arms, arm, levels(arms)[0][1]) for arm in ends})
    leads, led = (any(one.word == "lower" for one in some.values()) for some in (ends, early))
    is_sure = all(one.said != "a lead is not sure" for one in ends.values())
    word = "Yes" if leads else "No" if not led else EARLY if is_sure else NOT_SURE
    return Outcome(word, ends, early, how)


def _together(ratios: Mapping[str, Ratio]) -> dict[str, Ratio]:
    """Those that are claimed, judged as several."""
    known = {arm: ratio.estimate for arm, ratio in ratios.items() if ratio.is_claimed}
    return {arm: Ratio(one) for arm, one in holm(known).items()}


def answer(arms: Arms, how: str = TUNED) -> str:
    """The claim in a sentence: yes, early, or no; of no arm with fewer than three seeds."""
    word, ends, early, _ = outcome(arms)
    if not word:
        return "**There is no answer yet**: no form of LocAteR has three seeds beside `none`."
    shown = together([f"{ratio} with {ARMS[arm]}{ratio.shown_p}" for arm, ratio in ends.items()])
    sooner = together([f"{ratio} with {ARMS[arm]}" for arm, ratio in early.items()])
    step = levels(arms)[0][0]
    return (
        f"**{word}.** At the end of training the perplexity is {shown}, of that of `none` ({_judged(ends, how)}). "
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
        means = {arm: fmean(_at_end(run, name) for run in arms[arm].values()) for arm in ("none", *told)}
        changes = {arm: against_none(arms, arm, lambda run, name=name: _at_end(run, name)) for arm in told}
        others = together([f"{means[arm]:.2f}{unit} with {ARMS[arm]} ({changes[arm]})" for arm in told])
        parts.append(f"{symbol} ends at {means['none']:.2f}{unit} without LocAteR, and at {others}")
    return "; ".join(parts) + "." if told else ""


def _at_end(run: Run, name: str) -> float:
    return run.validations[max(run.validations)][name]


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
five seeds; then words. Every arm has its own strength and rate, tuned on seed 100, which is not judged. A ratio is that
of perplexities, with an interval of 95 %, paired by seed; of fewer than three seeds there is none."""
WORDS = "Words (33,278), dropout 0.1, decoupled decay 0.01, four epochs of a cosine:"


def tuning(kept: Path = KEPT) -> str:
    """Losses of the unjudged seed at A's length, by arm and rate."""
    found: dict[str, list[str]] = {}
    for path in sorted((kept / "rates").glob("*/metrics.jsonl")):
        arm, rate, *_ = path.parent.name.split("-")
        losses = {row["step"]: row["loss"] for row in read_metrics(path) if row["kind"] == "validation"}
        if ENDS["A"] in losses:
            found.setdefault(arm, []).append(f"{losses[ENDS['A']]:.4f} ({rate})")
    told = "; ".join(f"`{arm}` {', '.join(found[arm])}" for arm in ("none", *ARMS) if arm in found)
    return f"Rates at that length, on the seed that is not judged, loss (rate): {told}." if told else ""


def floors(stage: str) -> list[str]:
    """Losses of tables that were counted from the training text."""
    if not (KEPT / "floors.json").exists():
        return []
    kept = json.loads((KEPT / "floors.json").read_text(encoding="utf-8"))[stage]
    tables = f"{kept['unigram']:.3f} for single tokens, {kept['bigram']:.3f} for pairs"
    return ["", f"Floors, of tables counted from the training text (`python runs/settled_floors.py DATA`): {tables}."]


BUDGETS = "Between budgets `none` still falls, {losses}: none of them is convergence."
LONGER = """Twice the length (`python runs/settle.py DATA OUT --arms none,held --until A --steps 20000`, with the kept
rows of `tune` and `rates` copied to OUT/rows), at the strengths and rates above:"""
WORDS_NOT_RUN = """Not run: rates of the words were not tuned. `python runs/settle.py DATA OUT`, with the kept rows
copied to OUT/rows, chooses them among three on the tuning seed (six runs of 16 minutes), and judges an arm anew whose
best is another."""


def budgets(kept: Path = KEPT) -> str:
    """The losses of `none` by the length of its schedule."""
    tuned = [read_metrics(path) for path in kept.glob("tune/none-*/metrics.jsonl")]
    ends = [[row["loss"] for row in rows if row["kind"] == "validation"][-1] for rows in tuned]
    losses = {2000: min(ends, default=0.0)}
    for stage in ("A", "A-20000"):
        if runs := read(stage, kept).get("none"):
            losses[ENDS[stage]] = fmean(map(last_loss, runs.values()))
    if not losses[2000] or len(losses) == 1:
        return ""
    return BUDGETS.format(losses=together([f"{loss:.3f} in {steps:,} steps" for steps, loss in losses.items()]))


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
    parts = [OPENING, "", "`python runs/settled.py`", ""]
    for stage, title in (("A", "A. Byte pairs:"), ("A-20000", LONGER), ("B", f"B. {WORDS}")):
        arms = read(stage, kept)
        rate = rates(stage, kept) | rates(f"{stage}-tuned", kept)
        told = _stage(stage, arms, rate, how_tuned(stage, arms, kept)) if arms else ["No run has ended yet."]
        parts += [title, "", *told, ""]
    untuned = "" if how_tuned("B", read("B", kept), kept) == TUNED else WORDS_NOT_RUN
    parts += [part for text in (tuning(kept), budgets(kept), cost(kept), untuned) if text for part in (text, "")]
    if read("A", kept):
        parts += [f"![Four arms to the end of training: perplexity, entropy and spectrum]({PICTURE})", ""]
    return "\n".join(parts)


def _stage(stage: str, arms: Arms, rate: Mapping[str, float], how: str) -> list[str]:
    missing = {arm: SEEDS[stage] - len(arms.get(arm, {})) for arm in (("none", *ARMS) if stage == "A" else arms)}
    open_ones = together([f"`{arm}` {count}" for arm, count in missing.items() if count > 0])
    lines = [answer(arms, how), "", *table(arms, rate), ""]
    lines += [part for text in (course(arms), localises(arms)) if text for part in (text, "")]
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


def draw(arms: Arms) -> None:
    from locater.report import figures
    from locater.report.curves import curves

    runs = [run for some in arms.values() for run in some.values()]
    figures.save(curves(compare_all(runs, folder="A", against="none")), PAGE.with_name(PICTURE))


def main() -> None:
    if sys.argv[1:2] == ["take"]:
        take(Path(sys.argv[2]))
    exchange(PAGE, BEGIN, END, f"\n{section()}\n")
    found = outcomes()
    exchange(README, said.LIMIT, "\n\n", said.limit(**found).removeprefix(said.LIMIT))
    exchange(STUDIES, BOX, "\n\n", said.advice(found["end"]))
    if "none" in (arms := read("A")):
        draw(arms)


def outcomes(kept: Path = KEPT) -> dict[str, Outcome]:
    """By its name in what the README says, the outcome of each stage."""
    found = {}
    for name, stage in (("end", "A"), ("longer", "A-20000"), ("words", "B")):
        arms = read(stage, kept)
        found[name] = outcome(arms, how_tuned(stage, arms, kept))
    return found


def exchange(path: Path, begin: str, end: str, new: str) -> None:
    path.write_text(between(path.read_text(encoding="utf-8"), begin, end, new), encoding="utf-8")


if __name__ == "__main__":
    main()
