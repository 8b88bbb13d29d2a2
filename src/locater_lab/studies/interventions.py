"""Set from outside while a model trains: attention by windows, temperatures and held spectra, and texts that ask for
attention, whose tokens come again."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace

import numpy
import torch
from jaxtyping import Int
from torch import Tensor, nn

from locater.attention.calls import AttentionCall
from locater.errors import refusal
from locater.spectra import moments
from locater.stabilisers import Stabiliser
from locater.stabilisers.live.find import find_pairs
from locater.stabilisers.live.interception import Slots
from locater.stabilisers.live.pairs import Pair
from locater.stabilisers.mean import hold_trace

from ..data.batches import FAR, WindowBatches, draws
from ..data.sources import Data
from ..rivals import SpectralInitialisation

ROUNDS = 3  # of mean and scale in turn; each undoes little of the other, and only what the optimiser moved


class ChangedCalls(Stabiliser):
    """Every call of attention goes through `change` first; itself the handler of every module."""

    def __init__(self, model: nn.Module) -> None:
        self.slots = Slots(find_pairs(model, trained=False), lambda name: self)

    def __call__(self, module: nn.Module, call: AttentionCall) -> Tensor:
        return self.change(call).attend()

    @abstractmethod
    def change(self, call: AttentionCall) -> AttentionCall: ...

    def detach(self) -> None:
        self.slots.remove()


class Window(ChangedCalls):
    """Every query sees its last `size` keys and no others."""

    def __init__(self, model: nn.Module, size: int) -> None:
        if size < 1:
            raise refusal("a window of at least 1 key", size)
        self.size = size
        super().__init__(model)

    def change(self, call: AttentionCall) -> AttentionCall:
        ones = torch.ones(call.query.shape[-2], call.key.shape[-2], dtype=torch.bool, device=call.query.device)
        return call.changed(attn_mask=ones.tril().triu(1 - self.size), is_causal=False)


class Temperature(ChangedCalls):
    """Every logit times `factor`: sharper attention above 1, flatter below, of the same weights."""

    def __init__(self, model: nn.Module, factor: float) -> None:
        if not 0 < factor < math.inf:
            raise refusal("a positive, finite factor", factor)
        self.factor = factor
        super().__init__(model)

    def change(self, call: AttentionCall) -> AttentionCall:
        return call.changed(scale=self.factor * call.scaling)


class HeldAttention(Stabiliser):
    """ξ and η (in units of λ) of every head, from the start and after every step; all else is free to learn."""

    def __init__(self, model: nn.Module, *, xi: float, eta: float) -> None:
        SpectralInitialisation(model, xi=xi, eta=eta)
        self.xi, self.eta, self.pairs = xi, eta, find_pairs(model)

    @torch.no_grad()
    def step(self) -> None:
        for pair in self.pairs:
            for _ in range(ROUNDS):
                hold(pair, self.xi, self.eta)


def hold(pair: Pair, xi: float, eta: float) -> None:
    """The trace to ξηλ by the smallest change, then both weights by one factor to ηλ."""
    shard = pair.shard()
    target = torch.full(pair.shape, xi * eta * pair.temperature, dtype=torch.float64)
    hold_trace(shard, target)
    size = eta * pair.temperature / moments(shard.query.double(), shard.key.double()).eta
    root = size.sqrt()[..., None, None].to(shard.query)
    shard.query.mul_(root)
    shard.key.mul_(root)
    shard.commit()


Batch = tuple[Int[Tensor, "count length"], Int[Tensor, "count length"]]
NUM_WORDS = 64  # of the far task: few, so that what is to be learnt is where to look


@dataclass(frozen=True)
class Repeats:
    """Random tokens that come again, `lag` or, if that is 0, a random number of tokens later."""

    num_words: int
    length: int
    seed: int
    lag: int = 0
    num_training: int = 10_000  # endless: an epoch is only a unit
    num_validation: int = 512

    @property
    def tokens_per_sample(self) -> int:
        return self.length

    def training(self, first: int, count: int) -> Batch:
        texts = torch.stack([self._text(number) for number in range(first, first + count)])
        return texts[:, :-1], texts[:, 1:]

    def validation(self, first: int, count: int) -> Batch:
        return self.training(FAR + first, count)

    def _text(self, number: int) -> Int[Tensor, " length"]:
        random = draws(self.seed, number)
        lag = self.lag or int(random.integers(self.length // 4, self.length // 2 + 1))
        words = random.integers(self.num_words, size=lag)
        return torch.from_numpy(numpy.resize(words, self.length + 1))


@dataclass(frozen=True)
class Beside:
    """Every second text of training is one of repeats; validation is of the text alone."""

    text: WindowBatches
    repeats: Repeats

    @property
    def num_training(self) -> int:
        return 2 * self.text.num_training

    @property
    def num_validation(self) -> int:
        return self.text.num_validation

    @property
    def tokens_per_sample(self) -> int:
        return self.text.tokens_per_sample

    def training(self, first: int, count: int) -> Batch:
        parts = [
            (self.repeats if number % 2 else self.text).training(number // 2, 1)
            for number in range(first, first + count)
        ]
        tokens, targets = zip(*parts, strict=True)
        return torch.cat(tokens), torch.cat(targets)

    def validation(self, first: int, count: int) -> Batch:
        return self.text.validation(first, count)


def far(data: Data) -> Data:
    """Nothing but tokens that stood half a text before: the last ones say nothing of the next."""
    length = data.batches.tokens_per_sample
    seed = data.batches.seed if isinstance(data.batches, WindowBatches) else 0
    return replace(data, batches=Repeats(NUM_WORDS, length, seed, lag=length // 2), tokens=None)


def with_repeats(data: Data) -> Data:
    """The text, and beside it tokens that come again: copying is worth learning."""
    assert isinstance(data.batches, WindowBatches) and data.tokens is not None
    text = data.batches
    repeats = Repeats(data.tokens.vocabulary.size, text.length, text.seed)
    return replace(data, batches=Beside(text, repeats))
