"""`predict`: what each head will do, from its weights and single tokens of its inputs, held against what it does."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from os import PathLike, fspath
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..behaviour import EMBEDDED, RANDOM_IDS
from ..budget import door
from ..errors import callers_own, refusal
from ..models import AttentionModule, read_heads, wanted_layers
from ..models.sources import Live, Source, Stored, as_source
from ..packages import packaged
from ..texts import embedded_text
from .language_model import load_model, load_tokenizer, type_note
from .numbers import Gatherer
from .random_ids import num_embeddings, random_ids
from .result import HeadPrediction, Prediction
from .running import next_token_losses, run_model, self_attention
from .sampling import InputsCollector, LayerInputs, kept_windows, predict_layer
from .streamed import CannotStream, streamed
from .windows import (
    Effort,
    Terms,
    Text,
    Tokens,
    Windows,
    check_fits,
    check_vocabulary,
    check_window,
    cut_lines,
    cut_windows,
    longest,
    split_windows,
    vocabulary_size,
)

__all__ = ["Effort", "HeadPrediction", "Prediction", "Terms", "Text", "Tokens", "predict"]

Progress = Callable[[int, int], None]  # steps done, and in all
Step = Callable[[int], None]  # told how many steps were done
RANDOM = "random"  # instead of the name of a file
MOST_LOGITS = 2**27  # numbers of an output layer that are held at once


def predict(
    source: Source,
    *,
    text: str | PathLike[str] | Text | Tokens | None = None,
    layers: Iterable[int] | None = None,
    effort: Effort | None = None,
    terms: Terms | None = None,
    progress: Progress | None = None,
) -> Prediction:
    """Predict every head's attention from its inputs on one part of a text, taken apart; measure it on the other.

    `text` is a file, by default Python's docstrings; `Text` names a tokenizer beside it, `Tokens` are windows that were
    cut already, of which a share is measured. "random" draws ids by Zipf's law: no text, no tokenizer; a stored model
    is then run from its file where that is possible, and never held as a whole. The heads of a live module that no
    table knows are found in one pass over a window; where it calls no attention kernel, `Live(module, heads=…,
    causal=…)` names their projections, without positions. Cost: one forward pass per window, and a few drawn texts per
    head; memory per layer: a few windows of its inputs.
    """
    effort, terms, source = effort or Effort(), terms or Terms(), as_source(source)
    text = text if isinstance(text, Text | Tokens) else Text(text)
    layers = None if layers is None else set(layers)
    _check_options(source)
    if isinstance(source, Live):
        return _predict_whole(source, text, layers, effort, terms, progress)
    # Results bear the name that was given, as a scan's do: a page joins both by it, and no path of a machine is sent.
    given, source = source.name, replace(source, place=packaged(source.place))
    with door(given, seconds=source.timeout):
        if isinstance(text, Text) and text.path == RANDOM:
            with suppress(CannotStream):
                return replace(_predict_streamed(source, layers, effort, terms, progress), source=given)
        return replace(_predict_whole(source, text, layers, effort, terms, progress), source=given)


def _check_options(source: Stored | Live) -> None:
    """Refuse options of reading that running a model would pass over."""
    unused = ("adapter", "layout", "allow_pickle") if isinstance(source, Stored) else ("sample", "layout")
    for name in unused:
        if getattr(source, name) not in (None, False):
            raise refusal(f"a model without {name}=…, for running it", "one", "load it yourself and give the module")


def _predict_whole(
    source: Stored | Live,
    text: Text | Tokens,
    layers: Iterable[int] | None,
    effort: Effort,
    terms: Terms,
    progress: Progress | None,
) -> Prediction:
    """The model held in memory: a live one, or as transformers loads it."""
    place = source.module if isinstance(source, Live) else source.place
    model = load_model(place)
    effort = _fit_window(effort, model)
    live = source if isinstance(source, Live) else Live(model)
    attention_on = partial(self_attention, model, heads=live.heads, causal=live.causal)
    if isinstance(text, Text) and text.path == RANDOM:
        sample = torch.arange(effort.window)[None] % num_embeddings(model)
        found, left_out = attention_on(sample)
        windows, text_name = random_ids(place, model, effort, causal=_is_causal(found)), RANDOM_IDS
    else:
        windows, text_name = _read_windows(place, model, text, effort)
        check_fits(model, windows)
        found, left_out = attention_on(windows.test[:1])
    rows, loss = _compute(model, chosen_of(found, layers), windows, effort=effort, terms=terms, progress=progress)
    left_out += [] if isinstance(source, Live) else type_note(source.place)
    loss = None if text_name == RANDOM_IDS else loss  # random ids cannot be foretold
    counts = len(windows.calibration), len(windows.test)
    return Prediction(source.name, text_name, windows.length, *counts, tuple(rows), tuple(left_out), loss)


def _predict_streamed(
    source: Stored, layers: Iterable[int] | None, effort: Effort, terms: Terms, progress: Progress | None
) -> Prediction:
    """The model run from its file, one layer's weights at a time; `CannotStream` where that is not possible."""
    rows: list[HeadPrediction] = []
    left_out: list[str] = []
    with streamed(source.place) as model:
        chosen = chosen_of(model.attention, layers)
        effort = _fit_window(effort, model.module)
        windows = random_ids(source.place, model.module, effort, causal=_is_causal([read_heads(chosen[0])]))
        step = _Steps(progress, len(chosen))

        def take(number: int, x: Tensor) -> None:
            layer = read_heads(chosen[number])
            collector = collector_of(layer, windows, effort=effort, terms=terms)
            for part in x[: len(windows.calibration)].split(effort.batch):
                collector.add(part)
            gatherers = [Gatherer(head, windows.length) for head in layer.heads]
            _gather(gatherers, layer, x[len(windows.calibration) :])
            rows.extend(_rows(layer, collector.inputs(), gatherers, effort=effort, terms=terms))
            left_out.extend(layer.refused)
            step(1)

        model.run(chosen, torch.cat([windows.calibration, windows.test]), take)
    counts = len(windows.calibration), len(windows.test)
    return Prediction(source.name, RANDOM_IDS, windows.length, *counts, tuple(rows), tuple(left_out), None)


def _compute(
    model: nn.Module,
    chosen: Sequence[AttentionModule],
    windows: Windows,
    *,
    effort: Effort,
    terms: Terms,
    progress: Progress | None,
) -> tuple[list[HeadPrediction], float | None]:
    """Every head predicted and measured, and the loss on the measured windows."""
    step = _Steps(progress, len(windows.calibration) + len(windows.test) + len(chosen))
    was_training = model.training
    try:
        model.eval()
        collected = calibrate(model, chosen, windows, effort=effort, terms=terms, step=step)
        gathered, loss = measure(model, chosen, windows.test, batch=effort.batch, step=step)
    finally:
        model.train(was_training)
    rows: list[HeadPrediction] = []
    for layer, inputs, gatherers in zip(chosen, collected, gathered, strict=True):
        rows += _rows(layer, inputs, gatherers, effort=effort, terms=terms)
        step(1)
    return rows, loss


def _rows(
    layer: AttentionModule, inputs: LayerInputs, gatherers: Sequence[Gatherer], *, effort: Effort, terms: Terms
) -> list[HeadPrediction]:
    predicted = predict_layer(layer, inputs, effort=effort, terms=terms)
    return [
        HeadPrediction(layer.block, layer.number, head.index, numbers, measured.numbers(), measured.halves())
        for head, numbers, measured in zip(layer.heads, predicted, gatherers, strict=True)
    ]


def _is_causal(layers: Sequence[AttentionModule]) -> bool:
    return all(head.lookahead == 0 for layer in layers for head in layer.heads)


def calibrate(
    model: nn.Module, layers: Sequence[AttentionModule], windows: Windows, *, effort: Effort, terms: Terms, step: Step
) -> list[LayerInputs]:
    """Gather the inputs of every layer over the calibration windows."""
    collectors = [collector_of(layer, windows, effort=effort, terms=terms) for layer in layers]
    for ids in windows.calibration.split(effort.batch):
        run_model(model, layers, ids, lambda number, x: collectors[number].add(x))
        step(len(ids))
    return [collector.inputs() for collector in collectors]


def collector_of(layer: AttentionModule, windows: Windows, *, effort: Effort, terms: Terms) -> InputsCollector:
    length, num_windows = windows.length, len(windows.calibration)
    kept = kept_windows(num_windows, length=length, texts=effort.texts)
    rank = effort.lag_rank_of(layer.heads[0].d_model, num_windows)
    return InputsCollector(alone=windows.alone, terms=terms, lag_rank=rank, length=length, kept=kept)


def measure(
    model: nn.Module,
    layers: Sequence[AttentionModule],
    windows: Int[Tensor, "windows tokens"],
    *,
    batch: int,
    step: Step,
) -> tuple[list[list[Gatherer]], float | None]:
    """Measure each head on these windows, and the loss per token where the model predicts the next one."""
    gatherers = [[Gatherer(head, windows.shape[1]) for head in layer.heads] for layer in layers]
    losses: list[float] = []
    # The logits of all tokens are held together: few windows at once where the vocabulary is large.
    batch = max(1, min(batch, MOST_LOGITS // (windows.shape[1] * (vocabulary_size(model) or 1))))

    def take(number: int, x: Tensor) -> None:
        _gather(gatherers[number], layers[number], x)

    for ids in windows.split(batch):
        output = run_model(model, layers, ids, take)
        losses += next_token_losses(output, ids, model)
        step(len(ids))
    return gatherers, sum(losses) / len(losses) if losses else None


@torch.no_grad()
def _gather(gatherers: Sequence[Gatherer], layer: AttentionModule, x: Float[Tensor, "windows tokens d_model"]) -> None:
    """Measure the heads of a layer on its input, one window at a time."""
    for gatherer, head in zip(gatherers, layer.heads, strict=True):
        for text in x.float().split(1):
            gatherer.add(gatherer.logits(head, text))


class _Steps:
    """Count steps for a progress bar."""

    def __init__(self, progress: Progress | None, total: int):
        self.progress, self.total, self.done = progress, total, 0

    def __call__(self, count: int) -> None:
        self.done += count
        if self.progress:
            with callers_own():
                self.progress(self.done, self.total)


def _fit_window(effort: Effort, model: nn.Module) -> Effort:
    """Shorten the usual window for a model that takes less; one that was chosen stays, and is refused later."""
    most = longest(model)
    return replace(effort, window=most) if most is not None and effort.window == Effort.window > most else effort


def _read_windows(
    place: str | PathLike[str] | nn.Module, model: nn.Module, text: Text | Tokens, effort: Effort
) -> tuple[Windows, str]:
    """Cut the text into windows of tokens, and name the text."""
    if isinstance(text, Tokens):
        return _split_tokens(text.ids, text.special, effort), "tokens"
    tokenizer, named = text.tokenizer, text.tokenizer is not None
    if tokenizer is None or isinstance(tokenizer, str | PathLike):
        tokenizer = load_tokenizer(place if tokenizer is None else tokenizer)
    check_vocabulary(tokenizer, model, named=named)
    content, name = (embedded_text(), EMBEDDED) if text.path is None else (_read(text.path), fspath(text.path))
    if text.by_line:
        most = effort.calibration + effort.test
        return _split_tokens(*cut_lines(content, tokenizer, length=effort.window, most=most), effort), name
    counts = dict(num_calibration=effort.calibration, num_test=effort.test)
    return cut_windows(content, tokenizer, length=effort.window, **counts), name


def _split_tokens(tokens: Tensor, special: Sequence[int], effort: Effort) -> Windows:
    """Take a share of the windows to measure on, as large as that of `effort`."""
    check_window(tokens.shape[1])
    if len(tokens) < 2:
        raise refusal("at least two windows of tokens", len(tokens), "one part calibrates, the other is measured")
    num_test = min(max(1, len(tokens) * effort.test // (effort.test + effort.calibration)), len(tokens) - 1)
    return split_windows(tokens, num_test=num_test, special=special)


def _read(text: str | PathLike[str]) -> str:
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise refusal(f"a readable text at {text}", getattr(reason, "strerror", None) or reason) from None


def chosen_of(found: list[AttentionModule], layers: Iterable[int] | None) -> list[AttentionModule]:
    wanted = wanted_layers(layers, (layer.number for layer in found))
    return [layer for layer in found if layer.number in wanted]
