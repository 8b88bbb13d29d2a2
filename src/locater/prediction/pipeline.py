"""Calibrate, predict, measure: the model is run once over each window, and its layers' inputs are never kept."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..models import Layer
from .effort import Effort
from .expected import lag_shift
from .gaussian import of_moments
from .inputs import Inputs, InputsCollector
from .language_model import run
from .numbers import Gatherer, Numbers
from .positions import around_offsets, lags_around_offsets, position_offsets
from .sampling import draw_texts
from .terms import Terms
from .windows import Windows

EVERY = 4  # queries of a drawn text that are looked at: every fourth
Step = Callable[[int], None]  # told how many steps were done


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


@torch.no_grad()
def predict_layer(layer: Layer, inputs: Inputs, *, effort: Effort, terms: Terms) -> list[Numbers]:
    """What each head of a layer does on texts drawn from the moments of its inputs."""
    # Layers must not share their luck: it would not average out over the model.
    generator = torch.Generator().manual_seed(effort.seed + layer.number)
    ordinary, lagged, offsets = of_moments(inputs.ordinary), inputs.lagged, None
    if terms.positions:
        offsets = position_offsets(inputs.by_position, inputs.counts, ordinary)
    if offsets is not None:
        ordinary = around_offsets(ordinary, offsets)
        lagged = lagged and lags_around_offsets(lagged, offsets)
    x, plain = draw_texts(inputs, ordinary, offsets=offsets, count=effort.texts, generator=generator)
    found = []
    for head in layer.heads:
        gatherer = Gatherer(head, inputs.length, every=EVERY)
        shift = None if lagged is None else lag_shift(head, lagged, x[plain], length=inputs.length)
        for text, is_ordinary in zip(x.split(1), plain, strict=True):
            logits = gatherer.logits(head, text)
            gatherer.add(logits if shift is None else logits + between(shift, is_ordinary, gatherer.queries))
        found.append(gatherer.numbers())
    return found


def between(
    shift: Float[Tensor, " distances"], ordinary: Tensor, queries: Int[Tensor, " queries"]
) -> Float[Tensor, "queries keys"]:
    """The shift of every pair of ordinary tokens; others are drawn from moments of their own and have no lags."""
    positions = torch.arange(len(ordinary))
    by_distance = shift[queries[:, None] - positions + len(ordinary) - 1]
    return by_distance * (ordinary[queries, None] & ordinary)


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
