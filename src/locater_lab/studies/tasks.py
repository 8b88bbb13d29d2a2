"""Texts that ask something of attention: tokens that come again, alone or beside real text."""

from dataclasses import dataclass, replace

import numpy
import torch
from jaxtyping import Int
from torch import Tensor

from ..data.batches import FAR, Windows, draws
from ..data.sources import Data

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

    text: Windows
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
    seed = data.batches.seed if isinstance(data.batches, Windows) else 0
    return replace(data, batches=Repeats(NUM_WORDS, length, seed, lag=length // 2), tokens=None)


def with_repeats(data: Data) -> Data:
    """The text, and beside it tokens that come again: copying is worth learning."""
    assert isinstance(data.batches, Windows) and data.tokens is not None
    text = data.batches
    repeats = Repeats(data.tokens.vocabulary.size, text.length, text.seed)
    return replace(data, batches=Beside(text, repeats))
