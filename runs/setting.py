"""The smallest setting in which attention matters: `python runs/setting.py [OUT]`, rows kept in runs/measured/setting.

Settings are tried from the cheapest on, each at two rates, on seed 100, which no study judges. The first is taken in
which `none` beats a bigram table of the whole training text by 0.05 nats and uniform attention is 0.05 worse.
Stop it at any time and start it again: what is measured is kept.
"""

import json
import sys
from pathlib import Path

from locater_lab.studies.floors import ARMS, MARGIN, UNIFORM
from locater_lab.studies.small import nothing, result, train_small, trained

KEPT = Path(__file__).parent / "measured" / "setting"
SEED, RATES = 100, (5e-3, 1e-2)
# Width and steps, in the order of the time that they take.
LADDER = ((32, 500), (32, 1000), (64, 500), (48, 1000), (64, 1000), (32, 2000), (64, 1500), (32, 3000), (64, 2000))


def measure(out: Path, arm: str, width: int, steps: int, rate: float) -> dict[str, float]:
    path = out / f"{arm.replace(' ', '-')}-{width}-{steps}-{rate:g}.json"
    if not path.exists():
        config = trained(SEED, steps, d_model=width, d_feedforward=2 * width, learning_rate=rate)
        found = result(train_small(config, ARMS.get(arm, nothing)))
        path.write_text(json.dumps({name: float(f"{value:.5g}") for name, value in found.items()}) + "\n")
    return json.loads(path.read_text())


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for width, steps in LADDER:
        none = {rate: measure(out, "none", width, steps, rate) for rate in RATES}
        rate = min(none, key=lambda rate: none[rate]["best_loss"])
        loss, bigram = none[rate]["best_loss"], none[rate]["bigram"]
        words = f"width {width}, {steps} steps, rate {rate:g}: none {loss:.3f}, bigram {bigram:.3f}"
        if loss > bigram - MARGIN:
            print(words, flush=True)
            continue
        uniform = min(measure(out, UNIFORM, width, steps, rate)["best_loss"] for rate in RATES)
        is_enough = uniform >= loss + MARGIN
        print(f"{words}, {UNIFORM} {uniform:.3f}{': taken' if is_enough else ''}", flush=True)
        if is_enough:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else KEPT)
