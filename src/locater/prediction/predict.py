"""`predict`: what each head will do, from its weights and the moments of its inputs, held against what it does."""

from collections.abc import Callable, Iterable, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..errors import refusal
from ..models import Layer, spans
from ..training.data.embedded_text import embedded_text
from .inputs import Inputs, InputsCollector
from .language_model import Source, load_model, load_tokenizer, run, self_attention
from .numbers import Gatherer, Numbers
from .result import HeadPrediction, Prediction
from .sampling import predict_layer
from .settings import Effort, Terms, check_window
from .windows import Windows, cut, spread

__all__ = ["Effort", "HeadPrediction", "Prediction", "Terms", "predict"]

Progress = Callable[[int, int], None]  # steps done, and in all
Step = Callable[[int], None]  # told how many steps were done
EMBEDDED = "embedded text"


def predict(
    source: Source,
    *,
    text: str | PathLike[str] | None = None,
    tokens: Int[Tensor, "windows tokens"] | None = None,
    tokenizer: Any = None,
    layers: Iterable[int] | None = None,
    effort: Effort | None = None,
    terms: Terms | None = None,
    progress: Progress | None = None,
) -> Prediction:
    """Predict every head's attention from the moments of its inputs on one part of a text; measure it on the other.

    `text` is a file, by default the embedded text; `tokens` are windows that were cut already, of which a share is
    measured. Cost: one forward pass per window, and per layer one d×d eigenvalue problem; memory per layer O(d²).
    """
    effort, terms = effort or Effort(), terms or Terms()
    model = load_model(source)
    chosen, left_out = self_attention(model)
    chosen = _wanted(chosen, layers)
    windows, text_name = _windows(source, text, tokens, tokenizer, effort)
    _check_length(model, windows.length)
    step = _Steps(progress, len(windows.calibration) + len(windows.test) + len(chosen))
    was_training = model.training
    try:
        model.eval()
        collected = calibrate(model, chosen, windows, effort=effort, terms=terms, step=step)
        measured = measure(model, chosen, windows, effort=effort, step=step)
    finally:
        model.train(was_training)
    rows: list[HeadPrediction] = []
    for layer, inputs, numbers in zip(chosen, collected, measured, strict=True):
        predicted = predict_layer(layer, inputs, effort=effort, terms=terms)
        for head, *pair in zip(layer.heads, predicted, numbers, strict=True):
            rows.append(HeadPrediction(layer.block, layer.number, head.index, *pair))
        step(1)
    name = type(source).__name__ if isinstance(source, nn.Module) else fspath(source)
    counts = len(windows.calibration), len(windows.test)
    return Prediction(name, text_name, windows.length, *counts, tuple(rows), tuple(left_out))


def calibrate(
    model: nn.Module, layers: Sequence[Layer], windows: Windows, *, effort: Effort, terms: Terms, step: Step
) -> list[Inputs]:
    """The moments of every layer's inputs over the calibration windows."""
    length, num_windows = windows.length, len(windows.calibration)
    collectors = []
    for layer in layers:
        rank, lag_rank = effort.ranks(layer.heads[0].d_model, num_windows)
        alone = windows.alone
        collectors.append(InputsCollector(alone=alone, terms=terms, rank=rank, lag_rank=lag_rank, length=length))
    for ids in windows.calibration.split(effort.batch):
        run(model, layers, ids, lambda number, x: collectors[number].add(x))
        step(len(ids))
    return [collector.inputs() for collector in collectors]


def measure(
    model: nn.Module, layers: Sequence[Layer], windows: Windows, *, effort: Effort, step: Step
) -> list[list[Numbers]]:
    """What each head does on the test windows."""
    gatherers = [[Gatherer(head, windows.length) for head in layer.heads] for layer in layers]

    @torch.no_grad()
    def take(number: int, x: Tensor) -> None:
        for gatherer, head in zip(gatherers[number], layers[number].heads, strict=True):
            for text in x.float().split(1):
                gatherer.add(gatherer.logits(head, text))

    for ids in windows.test.split(effort.batch):
        run(model, layers, ids, take)
        step(len(ids))
    return [[gatherer.numbers() for gatherer in of_layer] for of_layer in gatherers]


class _Steps:
    """Counts steps for whoever wants to know."""

    def __init__(self, progress: Progress | None, total: int):
        self.progress, self.total, self.done = progress, total, 0

    def __call__(self, count: int) -> None:
        self.done += count
        if self.progress:
            self.progress(self.done, self.total)


def _windows(
    source: Source, text: str | PathLike[str] | None, tokens: Tensor | None, tokenizer: Any, effort: Effort
) -> tuple[Windows, str]:
    if tokens is not None:
        check_window(tokens.shape[1])
        if len(tokens) < 2:
            raise refusal("at least two windows of tokens", len(tokens), "one part calibrates, the other is measured")
        num_test = min(max(1, len(tokens) * effort.test // (effort.test + effort.calibration)), len(tokens) - 1)
        for_test = spread(len(tokens), num_test)
        return Windows(tokens[~for_test], tokens[for_test]), "tokens"
    tokenizer = load_tokenizer(source if tokenizer is None else tokenizer) if _is_name(tokenizer) else tokenizer
    content, name = (embedded_text(), EMBEDDED) if text is None else (_read(text), fspath(text))
    counts = dict(num_calibration=effort.calibration, num_test=effort.test)
    return cut(content, tokenizer, length=effort.window, **counts), name


def _is_name(tokenizer: Any) -> bool:
    return tokenizer is None or isinstance(tokenizer, str | PathLike)


def _read(text: str | PathLike[str]) -> str:
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise refusal(f"a readable text at {text}", getattr(reason, "strerror", None) or reason) from None


def _check_length(model: nn.Module, length: int) -> None:
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(most, int) and 0 < most < length:
        raise refusal(f"windows of at most {most} tokens, the model's longest", length, "choose a shorter --window")


def _wanted(chosen: list[Layer], layers: Iterable[int] | None) -> list[Layer]:
    if layers is None:
        return chosen
    known, wanted = {layer.number for layer in chosen}, set(layers)
    if not wanted or not wanted <= known:
        raise refusal(f"layers among {spans(sorted(known))}", spans(sorted(wanted - known)) or "none")
    return [layer for layer in chosen if layer.number in wanted]
