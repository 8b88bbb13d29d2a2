"""What the judged runs of runs/settle.py rest on: how rates were tuned, the precision, the length, the core-hours."""

import sys
from pathlib import Path
from statistics import fmean

from locater_lab.studies.runs import read_runs
from locater_lab.studies.statistics import FEWEST, together
from locater_lab.train.metrics import read_metrics

sys.path.insert(0, str(Path(__file__).parent))
from settled_rows import ENDS, KEPT, STAGES, how_tuned, last_loss, read, tried  # noqa: E402
from settled_said import ARMS, TUNED  # noqa: E402

COSTS = {
    "tune": "strengths and rates at 2,000 steps",
    "rates": "rates at 10,000",
    "A": "A",
    "A-20000": "A at 20,000",
    "B": "B",
}
COSTS |= {"B-rates": "rates of B", "B-tuned": "B at these"}


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


WORDS_NOT_RUN = """Tuned rates of the words were not afforded: {ended} of the six runs on the tuning seed has ended.
`python runs/settle.py DATA OUT`, with the kept rows copied to OUT/rows, runs the others (16 minutes each, on a core of
its own) and judges an arm anew whose best is another rate. `python runs/settled.py take OUT` writes it here."""


def words_untuned(kept: Path = KEPT) -> str:
    """What is missing before the rates of the words are tuned; nothing once they are."""
    ended = sum(map(len, tried("B-rates", kept).values()))
    return "" if how_tuned("B", kept) == TUNED else WORDS_NOT_RUN.format(ended=ended or "none")


PRECISION = """On the same texts `none` of the tuning seed has a training loss within {gap:.4f} of its own in bfloat16,
over {steps} steps ([rows](../runs/measured/settle/float32))."""


def precision(kept: Path = KEPT) -> str:
    """What float32 changes of the training loss, as far as the run went."""
    exact, rounded = (
        {row["step"]: row["loss"] for row in read_metrics(kept / part / "none-0.003" / "metrics.jsonl")}
        for part in ("float32", "tune")
    )
    gaps = {step: abs(loss - rounded[step]) for step, loss in exact.items() if step in rounded}
    return PRECISION.format(gap=max(gaps.values()), steps=max(gaps)) if gaps else ""


def budgets(kept: Path = KEPT) -> str:
    """The losses of `none` by the length of its schedule."""
    ends = tried("tune", kept).get("none", {})
    losses = {2000: min(ends.values())} if ends else {}
    for stage in ("A", "A-20000"):
        if len(runs := read(stage, kept).get("none", {})) >= FEWEST:
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
