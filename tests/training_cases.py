"""What the tests of training share: a small text, a tiny run, and how two runs are compared."""

from pathlib import Path

from safetensors.torch import load_file

from locater_lab.train.config import make_config
from locater_lab.train.metrics import read_metrics

# Sums and names in an order that no short rule gives, so that there is something to learn for longer than a test.
WORDS, ANIMALS = ("the", "a", "one", "my"), ("cat", "dog", "owl")
TEXT = "".join(
    f"{n} and {n * 37 % 101} make {n + n * 37 % 101} , said {WORDS[n * 7 % 4]} {ANIMALS[n * n % 3]} .\n"
    for n in range(900)
)

TINY = dict(
    tokenizer="bpe",
    bpe_size=300,
    context=16,
    d_model=16,
    d_feedforward=16,
    num_heads=2,
    steps=20,
    batch=4,
    warmup=5,
    log_every=3,
    validate_every=8,
    validation_windows=8,
    save_every=7,
)
# Everything that has a state of its own: dropout, accumulation, a stabiliser whose target moves.
STATEFUL = dict(
    dropout=0.1, accumulate=2, strength=1e-3, mean="1.5", mean_warmup=15, optimizer="adamw", weight_decay=0.1
)
TIMED = {"tokens_per_second"}


def write_text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def tiny(text: Path, **changed):
    return make_config("paper", data=str(text), **(TINY | changed))


def flags(text: Path, **changed) -> list[str]:
    """The same as arguments of the command."""
    options = {"data": str(text)} | TINY | changed
    return [part for name, value in options.items() for part in ("--set", f"{name}={value}")]


def weights(folder: Path):
    return load_file(folder / "model" / "model.safetensors")


def assert_same_run(found: Path, expected: Path) -> None:
    """Equal to the bit: weights, and all metrics but those of the clock."""
    ours, theirs = weights(found), weights(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].equal(tensor), f"{name} differs by {(ours[name] - tensor).abs().max()}"
    rows = [
        [{k: v for k, v in row.items() if k not in TIMED} for row in read_metrics(run / "metrics.jsonl")]
        for run in (found, expected)
    ]
    assert rows[0] == rows[1]
