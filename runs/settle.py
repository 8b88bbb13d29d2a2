"""The claim at convergence: is LocAteR still ahead when training ends? Tunes each arm, then runs A and B.

    python runs/settle.py DATA OUT [--until tune|A|B] [--arms none,held] [--steps N] [--precision P] [--quick]

A: 2,048 byte pairs of WikiText-2, 10,000 steps, cosine to 2 % of the rate, five seeds. B: words, dropout 0.1, four
epochs, `none` and the best arm of A, three seeds. All is tuned on seed 100, which is not judged: strengths in runs of
2,000 steps, rates at A's own length, since the best rate of a short run is too high for a long one. `--steps N` runs A
at another length, as the stage A-N; with the kept rows of `tune` and `rates` in OUT/rows it takes their rates. Stop it
at any time and start it again: ended runs are kept, the others continue to the bit. OUT/rows holds the metrics of ended
runs, which runs/measured keeps. Processes that are given different arms share an OUT. Products are taken in bfloat16
(autocast), weights, moments, softmax and loss are float32: 1.6 times as fast on the processor that ran A and B, a third
as fast on one without the instructions for it, where `--precision float32` is the choice for a stage of its own.
"""

import argparse
import contextlib
import fcntl
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

Options = dict[str, Any]
LOCATER = Path(sys.executable).with_name("locater")
COMMON: Options = dict(preset="paper", schedule="cosine", final_share=0.02, warmup=200, save_every=500, log_every=50)
BYTE_PAIRS: Options = COMMON | dict(tokenizer="bpe", bpe_size=2048)
# As fairseq's language models are trained, but for the batch and the length.
WORDS: Options = COMMON | dict(tokenizer="words", optimizer="adamw", weight_decay=0.01, clip=0.0, dropout=0.1)
WORDS |= dict(attention_dropout=0.0, learning_rate=1e-3, warmup=400, validate_every=510, save_every=100)
TUNING_SEED, RATES = 100, (1.5e-3, 3e-3, 6e-3)
LONG_RATES = (1.5e-3, 3e-3)
WORD_RATES = (1e-3, 2e-3, 5e-4)  # the first is the one that B was judged at before any was tuned
# By arm: the setting that is tuned beside the rate, and its values.
STRENGTHS: dict[str, tuple[str, tuple[float, ...]]] = {
    "none": ("", ()),
    "held": ("strength", (1e-4, 1e-3, 1e-2)),
    "released": ("strength", (1e-4, 1e-3, 1e-2)),
    "decay": ("qk_decay", (0.5, 2.0, 8.0)),
}
LENGTHS = {"tune": 2000, "A": 10_000, "epochs": 4.0}
STEPS_OF_AN_EPOCH = 1020  # of 16 × 128 words each
QUICK: Options = dict(context=16, d_model=16, d_feedforward=16, bpe_size=300, warmup=2, validation_windows=16)
QUICK |= dict(log_every=2, validate_every=4, save_every=4)
QUICK_LENGTHS = {"tune": 4, "A": 8, "epochs": 0.05}


class Runs:
    """Trains what is asked for, one run at a time, and remembers the loss that each ended with."""

    def __init__(
        self, data: Path, out: Path, *, quick: bool, steps: int | None = None, precision: str = "bf16"
    ) -> None:
        self.data, self.out, self.quick = data.resolve(), out, quick
        self.lengths = (QUICK_LENGTHS if quick else LENGTHS) | ({"A": steps} if steps else {})
        self.stage, self.precision = f"A-{steps}" if steps else "A", precision

    def loss(self, stage: str, name: str, options: Options) -> float:
        """The validation loss at the end of that run, which is trained first where it has not ended."""
        folder = self.out / "runs" / stage / name
        kept = self.out / "rows" / stage / name / "metrics.jsonl"
        if not kept.exists():
            self._train(folder, options | {"precision": self.precision} | (QUICK if self.quick else {}))
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / "metrics.jsonl", kept.with_suffix(".partial"))
            kept.with_suffix(".partial").rename(kept)
        rows = [json.loads(line) for line in kept.read_text().splitlines()]
        last = [row for row in rows if row["kind"] == "validation"][-1]
        print(f"{stage} {name}: loss {last['loss']:.4f} at step {last['step']}", flush=True)
        return last["loss"]

    def _train(self, folder: Path, options: Options) -> None:
        config, log_path = (folder.parent / f"{folder.name}.{ending}" for ending in ("config.json", "log"))
        folder.parent.mkdir(parents=True, exist_ok=True)
        document = json.dumps({"data": str(self.data)} | options, indent=1)
        if config.exists() and config.read_text() != document:
            sys.exit(f"{folder} was begun with other options ({config}): give these an OUT of their own")
        config.write_text(document)
        begun = (folder / "config.json").exists()
        arguments = ["--resume", folder] if begun else ["--config", config, "--out", folder]
        with log_path.open("a") as log:
            done = subprocess.run([LOCATER, "train", *arguments], stdout=log, stderr=log, check=False)
        if done.returncode:
            sys.exit(f"{folder} ended with {done.returncode}: see {log_path}")


def arm_options(arm: str, value: float, steps: int) -> Options:
    setting, _ = STRENGTHS[arm]
    options: Options = {setting: value} if setting else {}
    return options | ({"strength_until": steps // 4} if arm == "released" else {})


def tune(runs: Runs, arms: list[str]) -> dict[str, tuple[float, float]]:
    """By arm, its best rate and strength."""
    return {arm: tune_arm(runs, arm) for arm in arms}


def tune_arm(runs: Runs, arm: str) -> tuple[float, float]:
    """Rates at the middle strength, strengths at the best rate, half steps of it; then rates at A's length."""
    _, values = STRENGTHS[arm]

    def loss(rate: float, value: float, stage: str = "tune", length: str = "tune") -> float:
        steps = int(runs.lengths[length])
        every = steps if stage == "tune" else 1000
        options = BYTE_PAIRS | dict(learning_rate=rate, steps=steps, seed=TUNING_SEED, validate_every=every)
        name = f"{arm}-{rate:g}" + (f"-{value:g}" if values else "")
        return runs.loss(stage, name, options | arm_options(arm, value, steps))

    middle = values[len(values) // 2] if values else 0.0
    rate = lowest(lambda rate: loss(rate, middle), RATES)
    value = lowest(lambda value: loss(rate, value), values) if values else 0.0
    for factor in (0.5**0.5, 2**0.5):
        loss(float(f"{rate * factor:.2g}"), value)
    return lowest(lambda rate: loss(rate, value, "rates", "A"), LONG_RATES), value


def lowest(loss: Any, values: tuple[float, ...]) -> float:
    """The value with the least loss; a winner at the edge widens the grid, twice at most."""
    losses = {value: loss(value) for value in values}
    for _ in range(2):
        best, ordered = min(losses, key=losses.__getitem__), sorted(losses)
        if best not in (ordered[0], ordered[-1]):
            break
        ratio = ordered[1] / ordered[0]
        beyond = best * ratio if best == ordered[-1] else best / ratio
        losses[beyond] = loss(float(f"{beyond:.6g}"))
    return min(losses, key=losses.__getitem__)


def run_a(runs: Runs, tuned: dict[str, tuple[float, float]]) -> str:
    """Seeds outermost, so that arms can be compared wherever it stops; the best arm but `none`."""
    steps = runs.lengths["A"]
    losses: dict[str, list[float]] = {arm: [] for arm in tuned}
    for seed in range(5):
        for arm, (rate, value) in tuned.items():
            options = BYTE_PAIRS | dict(learning_rate=rate, steps=steps, seed=seed, validate_every=1000)
            losses[arm].append(
                runs.loss(runs.stage, f"{arm}-seed{seed}", options | arm_options(arm, value, int(steps)))
            )
    return min((arm for arm in losses if arm != "none"), key=lambda arm: sum(losses[arm]), default="none")


def run_b(runs: Runs, tuned: dict[str, tuple[float, float]], best: str) -> None:
    """Rates of both arms on the seed that is not judged, then three seeds at each arm's best one.

    Runs at the first rate are B; those at a tuned rate that is another one are kept apart, as B-tuned.
    """
    epochs = runs.lengths["epochs"]
    steps = round(STEPS_OF_AN_EPOCH * epochs)

    def loss(stage: str, arm: str, rate: float, seed: int, name: str) -> float:
        options = WORDS | dict(learning_rate=rate, epochs=epochs, seed=seed)
        return runs.loss(stage, name, options | arm_options(arm, tuned[arm][1], steps))

    def on_tuning_seed(arm: str, rate: float) -> float:
        return loss("B-rates", arm, rate, TUNING_SEED, f"{arm}-{rate:g}")

    arms = ("none", best)
    for rate in WORD_RATES:  # outermost, so that arms can be compared wherever it stops
        for arm in arms:
            on_tuning_seed(arm, rate)
    rates = {arm: lowest(partial(on_tuning_seed, arm), WORD_RATES) for arm in arms}
    for seed in range(3):
        for arm, rate in rates.items():
            loss("B" if rate == WORD_RATES[0] else "B-tuned", arm, rate, seed, f"{arm}-seed{seed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the folder with train.txt and valid.txt of WikiText-2")
    parser.add_argument("out", type=Path)
    parser.add_argument("--until", choices=["tune", "A", "B"], default="B")
    parser.add_argument("--arms", default=",".join(STRENGTHS), help="those that this process takes; B needs all")
    parser.add_argument("--steps", type=int, help="of A, in an OUT of its own, as the stage A-STEPS")
    parser.add_argument("--precision", choices=["bf16", "float32"], default="bf16", help="of products")
    parser.add_argument("--quick", action="store_true", help="a rehearsal in seconds")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    arms = given.arms.split(",")
    if unknown := set(arms) - set(STRENGTHS):
        parser.error(f"unknown arms {sorted(unknown)}: choose from {', '.join(STRENGTHS)}")
    with contextlib.ExitStack() as stack:
        for arm in arms:
            lock = stack.enter_context((given.out / f"{arm}.lock").open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                sys.exit(f"another process runs {arm} in {given.out}")
        runs = Runs(given.data, given.out, quick=given.quick, steps=given.steps, precision=given.precision)
        tuned = tune(runs, arms)
        if given.until != "tune":
            best = run_a(runs, tuned)
            if given.until == "B" and set(arms) == set(STRENGTHS):
                run_b(runs, tuned, best)


if __name__ == "__main__":
    main()
