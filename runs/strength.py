"""`python runs/strength.py`: what `strength="auto"` does to three kinds of run, over seeds (docs/stabilisers.md).

A run that goes well (the demo's), GPT-2's widths (12 heads of 64, one layer, 40 steps), and one that goes wrong (four
layers at a learning rate of 3e-2 without warm-up). With `--shares` other shares of the gradient are tried beside it.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean

import torch

from locater.records import Json
from locater.stabilisers import Auto, LocAteR
from locater.stabilisers.strength import SHARE
from locater_lab.demo.two_models import OPTIONS
from locater_lab.studies.small import nothing, result, train_small
from locater_lab.studies.statistics import paired
from locater_lab.train.config import make_config

TEXT: Json = dict(data="embedded", tokenizer="bpe", context=64, device="cpu")
WIDE = dict(bpe_size=1024, vocab_size=0, num_layers=1, dropout=0.0, batch=4, accumulate=1, warmup=10, steps=40)
WILD = dict(bpe_size=512, d_model=64, d_feedforward=128, batch=8, steps=300, warmup=0, learning_rate=3e-2)
KINDS: dict[str, tuple[str, Json]] = {
    "demo": ("paper", OPTIONS),
    "GPT-2's widths": ("gpt2", TEXT | WIDE),
    "unstable": ("small", TEXT | WILD),
}


def run(kind: str, share: float, seed: int) -> Json:
    """The last validation loss, the largest logit, and κ; a share of 0 is none."""
    preset, options = KINDS[kind]
    attach = (lambda model: LocAteR(model, strength=Auto(share))) if share else nothing
    ran = train_small(make_config(preset, **options | {"seed": seed}), attach)
    found = result(ran)
    row = {"loss": found["best_loss"], "largest_logit": found["largest_logit"]}
    return {"kind": kind, "share": share, "seed": seed} | row | {"strength": getattr(ran.stabiliser, "strength", 0.0)}


def line(rows: list[Json], kind: str, share: float) -> str:
    """One of the table, with the difference to none paired by seed."""
    ours, none = ({row["seed"]: row for row in rows if (row["kind"], row["share"]) == (kind, s)} for s in (share, 0.0))
    gain = paired(*({seed: row["loss"] for seed, row in some.items()} for some in (ours, none)))
    losses = ", ".join(f"{row['loss']:.3f}" for row in ours.values())
    logit, strength = (fmean(row[name] for row in ours.values()) for name in ("largest_logit", "strength"))
    return f"| {kind} | {share:.2f} | {losses} | {gain if share else ''} | {logit:.1f} | {strength:.1e} |"


def main(*, seeds: int, shares: list[float], rows: str) -> None:
    torch.set_num_threads(1)
    found = [run(kind, share, seed) for seed in range(seeds) for kind in KINDS for share in (0.0, *shares)]
    if rows:
        Path(rows).write_text(json.dumps(found), encoding="utf-8")
    print("| run | share | loss of each seed | against none [95 %] | largest logit | κ |\n|---|---|---|---|---|---|")
    print("\n".join(line(found, kind, share) for kind in KINDS for share in (0.0, *shares)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shares", type=float, nargs="*", default=[SHARE])
    parser.add_argument("--rows", default="", help="a JSON file for the numbers")
    main(**vars(parser.parse_args()))
