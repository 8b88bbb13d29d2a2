"""A text cut into windows of tokens, those for calibration apart from those that are measured; how many, how long."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..errors import refusal
from ..quantities import NEAR

# One of transformers, or of a registered loader: called on a text it gives `input_ids`. Most of its names are
# optional and asked for one by one, so no protocol says more than this.
Tokenizer = Any
SAMPLE = "a"  # any word: what a tokenizer puts around it, it puts around all
MOST_UNKNOWN = 0.1  # of a text's tokens
SMALLEST_SHARE = 0.25  # of the model's rows that a tokenizer found beside it must know


@dataclass(frozen=True)
class Effort:
    """Windows of `window` tokens: `calibration` of them to predict from, `test` others to measure.

    `texts` are drawn for each layer, from as many of its calibration windows. `lag_rank` bounds the rank of each lagged
    covariance: O(lag_rank²) numbers per lag and layer. `batch` windows are run at once.
    """

    window: int = 256
    calibration: int = 24
    test: int = 8
    lag_rank: int = 128
    texts: int = 16
    batch: int = 4
    seed: int = 0

    def __post_init__(self):
        check_window(self.window)
        if min(self.calibration, self.test, self.texts, self.batch) < 1:
            raise refusal("at least one window to calibrate on and one to test on", f"{self.calibration}, {self.test}")
        if self.lag_rank < 1:
            raise refusal("a rank of at least 1", self.lag_rank)

    def lag_rank_of(self, d_model: int, num_windows: int) -> int | None:
        """The rank for inputs this wide, None for full; a basis needs more tokens than its rank in the first batch."""
        most = max(1, min(self.batch, num_windows) * self.window // 2)
        return None if d_model <= self.lag_rank else min(self.lag_rank, most)


def check_window(length: int) -> None:
    if length < 2 * NEAR:
        raise refusal(f"windows of at least {2 * NEAR} tokens", length, f"keys nearer than {NEAR} are called near")


@dataclass(frozen=True)
class Terms:
    """Each term can be left out, to see what it adds to tokens from anywhere.

    `first`: the first token, and special tokens, stay in their places; so they do where `positions` are kept.
    `positions`: every token stays at its position.
    `sinks`: tokens that alone would draw more than the whole of a typical window stay in their windows too.
    `lags`: the expected logit takes the lagged covariances, tr W(Δ)Γ(Δ)/λ.
    """

    first: bool = True
    positions: bool = True
    sinks: bool = True
    lags: bool = True


@dataclass(frozen=True)
class Text:
    """A text file, or with "random" ids drawn from the vocabulary; None is Python's docstrings.

    `tokenizer` is one of transformers, or the place of one; by default that of the model. With `by_line` every line is
    a text of its own, of which the first tokens are a window.
    """

    path: str | PathLike[str] | None = None
    tokenizer: Tokenizer = None
    by_line: bool = False


@dataclass(frozen=True, eq=False)
class Tokens:
    """Windows of token ids that were cut already; `special` are positions of special tokens, negative from the end."""

    ids: Int[Tensor, "windows tokens"]
    special: Sequence[int] = ()


@dataclass(frozen=True)
class Windows:
    """Token ids to predict from and others to measure on; `special` are the positions of special tokens."""

    calibration: Int[Tensor, "calibration tokens"]
    test: Int[Tensor, "test tokens"]
    special: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return self.test.shape[1]

    @property
    def alone(self) -> tuple[int, ...]:
        """Positions of the first token and of special ones."""
        return tuple(sorted({0, *self.special}))


def split_windows(tokens: Int[Tensor, "windows tokens"], *, num_test: int, special: Iterable[int] = ()) -> Windows:
    """Spread the windows to measure among the others; `special` positions may count from the end.

    >>> split_windows(torch.arange(8).reshape(2, 4), num_test=1, special=[0, -1]).alone
    (0, 3)
    """
    length, for_test, special = tokens.shape[1], spread_evenly(len(tokens), num_test), list(special)
    if any(not -length <= position < length for position in special):
        raise refusal(f"special positions within windows of {length} tokens", special)
    return Windows(tokens[~for_test], tokens[for_test], special=tuple(sorted({place % length for place in special})))


def cut_windows(text: str, tokenizer: Tokenizer, *, length: int, num_calibration: int, num_test: int) -> Windows:
    """Part the text into equal stretches and take one window from the start of each, between special tokens.

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
    check_known([ids[len(before) : length - len(after)] for ids in windows], tokenizer)
    return split_windows(torch.tensor(windows), num_test=num_test, special=special_positions(before, after))


def cut_lines(
    text: str, tokenizer: Tokenizer, *, length: int, most: int
) -> tuple[Int[Tensor, "windows tokens"], list[int]]:
    """The first tokens of every line that has as many: texts that stand alone (proteins); and where special tokens are.

    A line that fits exactly keeps the special tokens at its end, which have their place where all lines fit.
    """
    before, after = special_tokens(tokenizer)
    windows = [[*before, *_encode(line, tokenizer), *after][:length] for line in text.splitlines() if line.strip()]
    windows = [ids for ids in windows if len(ids) == length][:most]
    if len(windows) < 2:
        remedy = "give more lines, or shorter windows"
        raise refusal(f"at least two lines of {length} tokens or more", len(windows), remedy)
    check_known(windows, tokenizer)
    whole = bool(after) and all(ids[-len(after) :] == after for ids in windows)
    return torch.tensor(windows), special_positions(before, after if whole else ())


def special_positions(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Positions of the special tokens of a window that begins and ends with these."""
    return [*range(len(before)), *range(-len(after), 0)]


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    """List the ids of a text without the special tokens."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def spread_evenly(total: int, chosen: int) -> Tensor:
    """Choose some of `total` windows, evenly: window n if the count rises there.

    >>> spread_evenly(8, 2).int().tolist()
    [0, 0, 0, 1, 0, 0, 0, 1]
    """
    return torch.arange(1, total + 1) * chosen // total > torch.arange(total) * chosen // total


def special_tokens(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """List the ids that the tokenizer puts before and after a text of its own accord, BOS where it says so."""
    bare = tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]
    full = tokenizer(SAMPLE)["input_ids"]
    starts = [at for at in range(len(full) - len(bare) + 1) if full[at : at + len(bare)] == bare]
    before, after = ([], []) if not starts or not bare else (full[: starts[0]], full[starts[0] + len(bare) :])
    bos = getattr(tokenizer, "bos_token_id", None)
    if getattr(tokenizer, "add_bos_token", False) and bos is not None and bos not in before:
        before = [bos, *before]
    return before, after


def check_known(windows: Sequence[Sequence[int]], tokenizer: Tokenizer) -> None:
    """Refuse a text that the tokenizer cannot read: unknown tokens say nothing of any head."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    total = sum(map(len, windows))
    share = sum(sum(one == unknown for one in ids) for ids in windows) / max(1, total)
    if unknown is not None and share > MOST_UNKNOWN:
        remedy = "give a text of its alphabet, name another tokenizer with --tokenizer, or use --text random"
        raise refusal(f"a text with at most {MOST_UNKNOWN:.0%} unknown tokens", f"{share:.0%}", remedy)


def check_vocabulary(tokenizer: Tokenizer, model: nn.Module, *, named: bool) -> None:
    """Refuse a tokenizer of another model, such as the empty one that transformers makes up where a folder has none.

    One that was `named` may be smaller than the model's vocabulary, never larger.
    """
    size, rows = len(tokenizer), vocabulary_size(model)
    remedy = "name the model's own with --tokenizer, or use --text random"
    if rows is None:
        return
    # Some models pad their vocabulary, and some tokenizers count added tokens that no row stands for.
    if not named and size < SMALLEST_SHARE * rows or size > 2 * rows:
        raise refusal(f"a tokenizer of about {rows} tokens, as many as the model has", f"one of {size}", remedy)


def vocabulary_size(model: nn.Module) -> int | None:
    """Rows of the table that token ids look up."""
    getter = getattr(model, "get_input_embeddings", None)
    table = getter() if getter is not None else getattr(model, "embedding", None)
    return getattr(table, "num_embeddings", None)


def longest(model: nn.Module) -> int | None:
    """Number of tokens that the model takes, where its config says so."""
    config = getattr(model, "config", None)
    most = getattr(config, "max_position_embeddings", None) or getattr(config, "context", None)
    return most if isinstance(most, int) and most > 0 else None


def check_fits(model: nn.Module, windows: Windows) -> None:
    """Refuse windows that are too long for the model, and ids that it has no row for."""
    most = longest(model)
    if most is not None and most < windows.length:
        raise refusal(
            f"windows of at most {most} tokens, the model's longest", windows.length, "choose a shorter --window"
        )
    rows, largest = vocabulary_size(model), int(max(windows.calibration.max(), windows.test.max()))
    if rows is not None and largest >= rows:
        raise refusal(f"token ids below {rows}, the model's vocabulary", largest, "name its own tokenizer")


def _some_tokens(stretch: str, tokenizer: Tokenizer, count: int) -> list[int]:
    """The first tokens of a stretch, from its first new line or word on; usually a few characters per token suffice."""
    start = max(stretch[:200].find("\n"), stretch[:40].find(" "), -1) + 1
    for characters in (8 * count, len(stretch)):
        ids = _encode(stretch[start : start + characters], tokenizer)
        if len(ids) > count:  # the last token may be cut, so one more than is taken
            break
    return ids[:count]
