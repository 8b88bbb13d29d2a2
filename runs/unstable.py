"""Where attention is what fails: `python runs/unstable.py [--out OUT]`, in the setting of runs/candidates.py.

A rate is blamed on attention by a positive control: QK-norm is below `none` there, and uniform attention is not. At the
first such rate above the best one of `none` every rival has its strength tuned, at that rate and on seed 100, which is
not judged; then five seeds. Rows are kept in runs/measured/candidates. Stop it at any time and start it again: what is
measured is kept.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean

from locater_lab.studies.floors import NONE, UNIFORM
from locater_lab.studies.statistics import Finding, MeanEstimate, corrected, paired

sys.path.insert(0, str(Path(__file__).parent))
from candidates import ARMS, KEPT, RIVALS, SEEDS, TUNING_SEED, Runs, lowest  # noqa: E402

CONTROL = "QK-norm"
RATES = (5e-3, 7.1e-3, 1e-2)
COMPARED = ("held", "brake", CONTROL, "QK-Clip", "σReparam of queries and keys", UNIFORM)


def losses(runs: Runs, arm: str, rate: float) -> tuple[float, dict[int, float]]:
    """Strength that was chosen at that rate, and the losses of the judged seeds."""
    tried = (ARMS | RIVALS)[arm].strengths
    strength = lowest(tried, lambda strength: runs.loss(arm, strength, rate, TUNING_SEED)) if len(tried) > 1 else 0.0
    return strength, {seed: runs.loss(arm, strength, rate, seed) for seed in SEEDS}


def is_blamed(control: MeanEstimate, uniform: MeanEstimate) -> bool:
    """Whether attention is what fails: QK-norm repairs it, and doing without attention does not."""
    return control.is_seen and control.value < 0 and not (uniform.is_seen and uniform.value < 0)


def search(runs: Runs) -> Iterator[tuple[float, float, MeanEstimate, MeanEstimate]]:
    """Rate by rate, the loss of `none` and what the controls differ from it by."""
    for rate in RATES:
        none = losses(runs, NONE, rate)[1]
        control, uniform = (paired(losses(runs, arm, rate)[1], none) for arm in (CONTROL, UNIFORM))
        yield rate, fmean(none.values()), control, uniform


def told(runs: Runs) -> Iterator[str]:
    """The tables of docs/reproduction.md."""
    yield "| rate | `none` | QK-norm − `none` [95 %] | uniform attention − `none` [95 %] | attention is what fails |"
    yield "|---|---|---|---|---|"
    found = list(search(runs))
    for rate, none, control, uniform in found:
        yield f"| {rate:g} | {none:.4f} | {control} | {uniform} | {'yes' if is_blamed(control, uniform) else 'no'} |"
    best = min(found, key=lambda row: row[1])[0]
    blamed = [rate for rate, _, control, uniform in found if rate > best and is_blamed(control, uniform)]
    if blamed:
        yield ""
        yield from compared(runs, blamed[0])


def compared(runs: Runs, rate: float) -> Iterator[str]:
    """Rivals at one rate, paired by seed, Holm over them."""
    rows: Mapping[str, tuple[float, dict[int, float]]] = {arm: losses(runs, arm, rate) for arm in (NONE, *COMPARED)}
    found = corrected([Finding("loss", arm, paired(rows[arm][1], rows[NONE][1])) for arm in COMPARED])
    yield f"| arm, at {rate:g} | strength | loss | against `none` [95 %] | p (Holm) | against `held` [95 %] |"
    yield "|---|---|---|---|---|---|"
    yield f"| none | – | {fmean(rows[NONE][1].values()):.4f} | – | – | {paired(rows[NONE][1], rows['held'][1])} |"
    for one in found:
        strength, own = rows[one.of]
        held = "–" if one.of == "held" else str(paired(own, rows["held"][1]))
        shown = f"{strength:.3g}" if strength else "–"
        yield f"| {one.of} | {shown} | {fmean(own.values()):.4f} | {one.estimate} | {one.estimate.shown_p} | {held} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=KEPT)
    print("\n".join(told(Runs(parser.parse_args().out, 3000))))


if __name__ == "__main__":
    main()
