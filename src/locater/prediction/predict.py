"""`predict`: what each head will do, from its weights and single tokens of its inputs, held against what it does."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..errors import callers_own, masked, refusal
from ..models import Layer, wanted_layers
from ..models.live.explicit import Explicit
from ..packaged import packaged
from ..texts import embedded_text
from .inputs import Inputs, InputsCollector, kept_windows
from .language_model import Source, at_door, load_model, load_tokenizer, next_token_losses, run, self_attention
from .model_type import note
from .numbers import Gatherer
from .result import HeadPrediction, Prediction
from .sampling import predict_layer
from .settings import Effort, Terms, check_window
from .windows import Tokenizer, Windows, check_vocabulary, cut, cut_lines, given, longest, vocabulary_size

__all__ = ["Effort", "HeadPrediction", "Prediction", "Terms", "predict"]

Progress = Callable[[int, int], None]  # steps done, and in all
Step = Callable[[int], None]  # told how many steps were done
EMBEDDED = "embedded text"
MOST_LOGITS = 2**27  # numbers of an output layer that are held at once


def predict(
    source: Source,
    *,
    text: str | PathLike[str] | None = None,
    tokens: Int[Tensor, "windows tokens"] | None = None,
    special: Sequence[int] = (),
    tokenizer: Tokenizer = None,
    by_line: bool = False,
    layers: Iterable[int] | None = None,
    heads: Sequence[Explicit] = (),
    causal: bool | None = None,
    effort: Effort | None = None,
    terms: Terms | None = None,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> Prediction:
    """Predict every head's attention from its inputs on one part of a text, taken apart; measure it on the other.

    `text` is a file, by default the embedded text, and with `by_line` every line of it is a text of its own, of which
    the first tokens are a window; `tokens` are windows that were cut already, of which a share is
    measured, with special tokens at the positions `special` (from the end where
    negative). The heads of a live module that no table knows are found in one pass over a window; where it calls no
    attention kernel, `heads` names their projections, as for `locater.heads`, without positions, and `causal` must be
    said. `timeout` is the number of seconds after which files from elsewhere are given up. Cost: one forward pass per
    window, and a few drawn texts per head; memory per layer: a few windows of its inputs.
    """
    effort, terms, source = effort or Effort(), terms or Terms(), packaged(source)
    with at_door(source, timeout):
        model = load_model(source)
        effort = _fitted(effort, model)
        windows, text_name = _windows(
            source, model, text=text, tokens=(tokens, special), tokenizer=tokenizer, by_line=by_line, effort=effort
        )
        _check_fits(model, windows)
        found, left_out = self_attention(model, windows.test[:1], heads=heads, causal=causal)
        chosen = chosen_of(found, layers)
        rows, loss = _compute(model, chosen, windows, effort=effort, terms=terms, progress=progress)
        left_out += [] if isinstance(source, nn.Module) else note(source)
    name = type(source).__name__ if isinstance(source, nn.Module) else masked(fspath(source))
    counts = len(windows.calibration), len(windows.test)
    return Prediction(name, text_name, windows.length, *counts, tuple(rows), tuple(left_out), loss)


def _compute(
    model: nn.Module,
    chosen: Sequence[Layer],
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
        predicted = predict_layer(layer, inputs, effort=effort, terms=terms)
        for head, one, own in zip(layer.heads, predicted, gatherers, strict=True):
            rows.append(HeadPrediction(layer.block, layer.number, head.index, one, own.numbers(), own.halves()))
        step(1)
    return rows, loss


def calibrate(
    model: nn.Module, layers: Sequence[Layer], windows: Windows, *, effort: Effort, terms: Terms, step: Step
) -> list[Inputs]:
    """Gather the inputs of every layer over the calibration windows."""
    length, num_windows = windows.length, len(windows.calibration)
    kept = kept_windows(num_windows, length=length, texts=effort.texts)
    ranks = (effort.lag_rank_of(layer.heads[0].d_model, num_windows) for layer in layers)
    collectors = [
        InputsCollector(alone=windows.alone, terms=terms, lag_rank=rank, length=length, kept=kept) for rank in ranks
    ]
    for ids in windows.calibration.split(effort.batch):
        run(model, layers, ids, lambda number, x: collectors[number].add(x))
        step(len(ids))
    return [collector.inputs() for collector in collectors]


def measure(
    model: nn.Module, layers: Sequence[Layer], windows: Int[Tensor, "windows tokens"], *, batch: int, step: Step
) -> tuple[list[list[Gatherer]], float | None]:
    """Measure each head on these windows, and the loss per token where the model predicts the next one."""
    gatherers = [gatherers_of(layer, windows.shape[1]) for layer in layers]
    losses: list[float] = []

    def take(number: int, x: Tensor) -> None:
        gather(gatherers[number], layers[number], x)

    for ids in windows.split(_at_once(model, windows.shape[1], batch)):
        output = run(model, layers, ids, take)
        losses += next_token_losses(output, ids, model)
        step(len(ids))
    return gatherers, sum(losses) / len(losses) if losses else None


def gatherers_of(layer: Layer, length: int) -> list[Gatherer]:
    return [Gatherer(head, length) for head in layer.heads]


@torch.no_grad()
def gather(gatherers: Sequence[Gatherer], layer: Layer, x: Float[Tensor, "windows tokens d_model"]) -> None:
    """Measure the heads of a layer on its input, one window at a time."""
    for gatherer, head in zip(gatherers, layer.heads, strict=True):
        for text in x.float().split(1):
            gatherer.add(gatherer.logits(head, text))


def _at_once(model: nn.Module, length: int, batch: int) -> int:
    """Number of windows for which the logits of all tokens stay within bounds."""
    return max(1, min(batch, MOST_LOGITS // (length * (vocabulary_size(model) or 1))))


class _Steps:
    """Count steps for a progress bar."""

    def __init__(self, progress: Progress | None, total: int):
        self.progress, self.total, self.done = progress, total, 0

    def __call__(self, count: int) -> None:
        self.done += count
        if self.progress:
            with callers_own():
                self.progress(self.done, self.total)


def _fitted(effort: Effort, model: nn.Module) -> Effort:
    """The usual window gives way to a model that takes less; one that was chosen does not, and is refused later."""
    most = longest(model)
    return replace(effort, window=most) if most is not None and effort.window == Effort.window > most else effort


def _windows(
    source: Source,
    model: nn.Module,
    *,
    text: str | PathLike[str] | None,
    tokens: tuple[Tensor | None, Sequence[int]],
    tokenizer: Tokenizer,
    by_line: bool,
    effort: Effort,
) -> tuple[Windows, str]:
    if tokens[0] is not None:
        return _given(tokens[0], tokens[1], effort), "tokens"
    named = tokenizer is not None
    if _is_name(tokenizer):
        tokenizer = load_tokenizer(tokenizer if named else source)
    check_vocabulary(tokenizer, model, named=named)
    content, name = (embedded_text(), EMBEDDED) if text is None else (_read(text), fspath(text))
    if by_line:
        most = effort.calibration + effort.test
        return _given(*cut_lines(content, tokenizer, length=effort.window, most=most), effort), name
    counts = dict(num_calibration=effort.calibration, num_test=effort.test)
    return cut(content, tokenizer, length=effort.window, **counts), name


def _given(tokens: Tensor, special: Sequence[int], effort: Effort) -> Windows:
    check_window(tokens.shape[1])
    if len(tokens) < 2:
        raise refusal("at least two windows of tokens", len(tokens), "one part calibrates, the other is measured")
    num_test = min(max(1, len(tokens) * effort.test // (effort.test + effort.calibration)), len(tokens) - 1)
    return given(tokens, num_test=num_test, special=special)


def _is_name(tokenizer: Tokenizer) -> bool:
    return tokenizer is None or isinstance(tokenizer, str | PathLike)


def _read(text: str | PathLike[str]) -> str:
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise refusal(f"a readable text at {text}", getattr(reason, "strerror", None) or reason) from None


def _check_fits(model: nn.Module, windows: Windows) -> None:
    """Refuse windows that are too long for the model, and ids that it has no row for."""
    most = longest(model)
    if most is not None and most < windows.length:
        raise refusal(
            f"windows of at most {most} tokens, the model's longest", windows.length, "choose a shorter --window"
        )
    rows, largest = vocabulary_size(model), int(max(windows.calibration.max(), windows.test.max()))
    if rows is not None and largest >= rows:
        raise refusal(f"token ids below {rows}, the model's vocabulary", largest, "name its own tokenizer")


def chosen_of(found: list[Layer], layers: Iterable[int] | None) -> list[Layer]:
    wanted = wanted_layers(layers, (layer.number for layer in found))
    return [layer for layer in found if layer.number in wanted]
