"""A text cut into windows of tokens, those for calibration apart from those that are measured."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ..errors import refusal

SAMPLE = "a"  # any word: what a tokenizer puts around it, it puts around all


@dataclass(frozen=True)
class Windows:
    """Token ids; the first `num_prefix` and the last `num_suffix` of each window are the tokenizer's special tokens."""

    calibration: Int[Tensor, "calibration tokens"]
    test: Int[Tensor, "test tokens"]
    num_prefix: int = 0
    num_suffix: int = 0

    @property
    def length(self) -> int:
        return self.test.shape[1]

    @property
    def alone(self) -> tuple[int, ...]:
        """Positions whose tokens have moments of their own: the first, and special tokens."""
        return (*range(max(1, self.num_prefix)), *range(self.length - self.num_suffix, self.length))


def cut(text: str, tokenizer: Any, *, length: int, num_calibration: int, num_test: int) -> Windows:
    """Part the text into equal stretches and take one window from the start of each.

    The windows to measure are spread evenly among the others, so that both see all of the text and share none of it.
    """
    before, after = special_tokens(tokenizer)
    inside, total = length - len(before) - len(after), num_calibration + num_test
    stretch = len(text) // total
    windows = []
    for number in range(total):
        ids = _some_tokens(text[number * stretch : (number + 1) * stretch], tokenizer, inside)
        if len(ids) < inside:
            remedy = "give a longer text, or fewer or shorter windows"
            raise refusal(f"a text of {total} windows of {length} tokens", f"{len(text)} characters", remedy)
        windows.append([*before, *ids, *after])
    ids, for_test = torch.tensor(windows), spread(total, num_test)
    return Windows(ids[~for_test], ids[for_test], len(before), len(after))


def spread(total: int, chosen: int) -> Tensor:
    """Which of `total` windows are chosen, evenly: window n if the count rises there.

    >>> spread(8, 2).int().tolist()
    [0, 0, 0, 1, 0, 0, 0, 1]
    """
    return torch.arange(1, total + 1) * chosen // total > torch.arange(total) * chosen // total


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and behind a text of its own accord."""
    bare = tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]
    full = tokenizer(SAMPLE)["input_ids"]
    starts = [at for at in range(len(full) - len(bare) + 1) if full[at : at + len(bare)] == bare]
    if not starts or not bare:
        return [], []
    return full[: starts[0]], full[starts[0] + len(bare) :]


def _some_tokens(stretch: str, tokenizer: Any, count: int) -> list[int]:
    """The first tokens of a stretch, from its first new line or word on; usually a few characters per token suffice."""
    start = max(stretch[:200].find("\n"), stretch[:40].find(" "), -1) + 1
    for characters in (8 * count, len(stretch)):
        ids = tokenizer(stretch[start : start + characters], add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) > count:  # the last token may be cut, so one more than is taken
            break
    return ids[:count]
