"""The theorem on real inputs: what its ρ says of each head with the random walk, and with the walk replaced.

Usage: python bench/theorem.py [SOURCE [TEXT [EVERY]]]; by default the MiniLM that pip brings, on the embedded text, and
every layer. Measured numbers, windows and table are those of bench/prediction.py. ρ is read as if it were attention,
a share of the context's sum. Γ(Δ) is measured at LAGS, over all tokens but the first, and interpolated in between.
"""

import sys
import time
from pathlib import Path

import torch
from gaussian_tokens import HeadInputs, expected_attention, profile

from locater import theory
from locater.attention.input_moments import InputMoments, MomentsCollector
from locater.head import Head
from locater.packages import packaged
from locater.prediction.language_model import load_model, load_tokenizer
from locater.prediction.numbers import NAMES, Numbers
from locater.prediction.predict import Effort, HeadPrediction, Prediction, measure
from locater.prediction.running import run_model, self_attention
from locater.prediction.sampling import effective, interpolate_lags
from locater.prediction.windows import cut_windows
from locater.quantities import NEAR
from locater.texts import embedded_text
from locater.theory.random_walk import Turns
from prediction import minilm

LAGS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
SAMPLE = 512  # tokens that say how norms behind a projection scale it


def head_inputs(head: Head, moments: InputMoments, sample: torch.Tensor, *, length: int) -> HeadInputs:
    """Move the measured moments into the head's space."""
    query, key = (effective(side, sample) for side in (head.query, head.key))
    at, lags = torch.tensor(moments.lags), torch.arange(length)
    keys = torch.stack([moments.between(key, key, lag) for lag in moments.lags])
    crossed = torch.stack([moments.between(query, key, lag) for lag in moments.lags])
    return HeadInputs(
        head.query(sample).double().mean(0),
        head.key(sample).double().mean(0),
        moments.between(query, query, 0),
        interpolate_lags(keys, at, lags),
        interpolate_lags(crossed, at, lags),
    )


def numbers(share: torch.Tensor) -> Numbers:
    """Read a profile over the context as the attention of its last query."""
    p = share.double() / share.double().sum().clamp_min(1e-300)
    distance = torch.arange(len(p) - 1, -1, -1)
    near = p[1:][distance[1:] < NEAR].sum() / p[1:].sum().clamp_min(1e-300)
    entropy = torch.special.entr(p).sum() / torch.tensor(float(len(p))).log()
    return Numbers(float(near), float(entropy), float(p[0]), float((p * distance).sum()), (), ())


@torch.no_grad()
def readings(head: Head, moments: InputMoments, sample: torch.Tensor, *, length: int) -> dict[str, Numbers]:
    head = head.anywhere()
    turns = None
    if head.rotary is not None:
        turns = Turns(head.rotary.pairs, head.rotary.frequencies(length).double(), head.rotary.amplitude)
    inputs = head_inputs(head, moments, sample, length=length)
    return {
        "ρ of the random walk": numbers(theory.profile(head, length=length)),
        "ρ of measured moments": numbers(profile(inputs, temperature=head.temperature, turns=turns)),
        "their clipped attention": numbers(expected_attention(inputs, temperature=head.temperature, turns=turns)),
    }


def main(source: str, text: str | None, every: int) -> None:
    effort, start = Effort(), time.perf_counter()
    source = packaged(source)
    model, tokenizer = load_model(source), load_tokenizer(source)
    content = Path(text).read_text(encoding="utf-8") if text else embedded_text()
    windows = cut_windows(
        content, tokenizer, length=effort.window, num_calibration=effort.calibration, num_test=effort.test
    )
    layers = self_attention(model)[0][::every]
    collectors = [MomentsCollector(lags=[lag for lag in LAGS if lag < windows.length], skip=1) for _ in layers]
    samples: list[list[torch.Tensor]] = [[] for _ in layers]

    def take(number: int, x: torch.Tensor) -> None:
        collectors[number].add(x)
        samples[number].append(x[:, 1:].flatten(0, 1)[:: windows.length // 16].float())

    for ids in windows.calibration.split(effort.batch):
        run_model(model, layers, ids, take)
    gathered, _ = measure(model, layers, windows.test, batch=effort.batch, step=lambda count: None)
    rows: dict[str, list[HeadPrediction]] = {}
    for layer, collector, some, gatherers in zip(layers, collectors, samples, gathered, strict=True):
        moments, sample = collector.moments(), torch.cat(some)[:SAMPLE]
        for head, gatherer in zip(layer.heads, gatherers, strict=True):
            for name, said in readings(head, moments, sample, length=windows.length).items():
                row = HeadPrediction(layer.block, layer.number, head.index, said, gatherer.numbers())
                rows.setdefault(name, []).append(row)
    print("Spearman / mean absolute error".ljust(30), *(name.rjust(24) for name in NAMES))
    for name, some in rows.items():
        found = Prediction(source, "", windows.length, effort.calibration, effort.test, tuple(some))
        cells = (f"{found.spearman[n] or 0:.3f} / {found.calibration_error[n]:.3f}".rjust(24) for n in NAMES)
        print(name.ljust(30), *cells, flush=True)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    given = [*sys.argv[1:], None, None, None]
    main(given[0] or minilm(), given[1] or None, int(given[2] or 1))
