"""Random ids for a model that is run without text: drawn by Zipf's law between the special tokens of its tokenizer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..checkpoints.bytes import LocalBytes
from ..checkpoints.gguf.header import read_header, read_vocabulary
from ..errors import Refusal, missing
from .language_model import load_tokenizer
from .windows import Effort, Windows, longest, special_positions, special_tokens, split_windows, vocabulary_size

BLANKS = " \t\r\n▁ĠĊĉ"  # and how tokenizers write them
ZIPF_SHIFT = 2.7  # Mandelbrot's: the most frequent words of a language are less frequent than 1/r has it


@dataclass(frozen=True)
class Alphabet:
    """Special ids of a tokenizer: those before and after a text, and those that are no words."""

    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    leave_out: list[int] = field(default_factory=list)
    evenly: bool = False  # the others are letters, in no order of frequency
    known: bool = False


def random_ids(place: str | PathLike[str] | nn.Module, model: nn.Module, effort: Effort, *, causal: bool) -> Windows:
    """Windows of ids as the tokenizer at `place` would give them, were words independent of each other."""
    num_rows, alphabet = num_embeddings(model), _alphabet(place)
    total = effort.calibration + effort.test
    length = min(effort.window, longest(model) or effort.window)
    ids = random_windows(num_rows, alphabet, count=total, length=length, seed=effort.seed)
    if not causal and not alphabet.known:
        # Vocabularies of encoders (WordPiece) begin with unused pieces and single characters, not with frequent words.
        shuffled = torch.randperm(num_rows, generator=torch.Generator().manual_seed(effort.seed))
        inside = slice(len(alphabet.before), length - len(alphabet.after))
        ids[:, inside] = shuffled[ids[:, inside]]
    return split_windows(ids, num_test=effort.test, special=special_positions(alphabet.before, alphabet.after))


def num_embeddings(model: nn.Module) -> int:
    rows = vocabulary_size(model)
    if rows is None:
        raise missing("a table of embeddings that ids look up", "give windows as Tokens")
    return rows


def _alphabet(source: str | PathLike[str] | nn.Module) -> Alphabet:
    """Nothing is left out where no tokenizer says what its ids are."""
    if isinstance(source, nn.Module):
        return Alphabet()
    if Path(source).suffix.lower() == ".gguf":  # its header says it; its tokenizer takes a minute to build
        file = LocalBytes(Path(source).expanduser())
        settings = read_header(file).settings
        bos = settings.get("tokenizer.ggml.bos_token_id")
        before = [bos] if bos is not None and settings.get("tokenizer.ggml.add_bos_token") else []
        return _classify(read_vocabulary(file), before, [], before)
    try:
        tokenizer = load_tokenizer(source)
    except Refusal:
        return Alphabet()
    before, after = special_tokens(tokenizer)
    special = [*getattr(tokenizer, "all_special_ids", []), *before, *after]
    names = getattr(tokenizer, "convert_ids_to_tokens", None)
    return _classify(names(range(len(tokenizer))) if names else [], before, after, special)


def _classify(tokens: Sequence[str | None], before: list[int], after: list[int], special: list[int]) -> Alphabet:
    """Build the alphabet from how the tokens are spelled; without spellings, from the special ids alone."""
    if not tokens:
        return Alphabet(before, after, special)
    leave_out, evenly = not_words(tokens)
    return Alphabet(before, after, sorted({*special, *leave_out}), evenly, known=True)


def random_windows(
    num_rows: int, alphabet: Alphabet, *, count: int, length: int, seed: int = 0
) -> Int[Tensor, "count tokens"]:
    """Ids drawn by Zipf's law, P(id of rank r) ∝ 1/(r + 2.7), or evenly, between special tokens.

    Vocabularies are mostly ordered by frequency, so ranks are ids without those that are left out.
    """
    before, after = alphabet.before, alphabet.after
    ordinary = torch.ones(num_rows, dtype=torch.bool)
    ordinary[[number for number in alphabet.leave_out if 0 <= number < num_rows]] = False
    ids = ordinary.nonzero()[:, 0]
    rank = torch.arange(len(ids), dtype=torch.float64)
    weight = torch.ones_like(rank) if alphabet.evenly else 1 / (rank + ZIPF_SHIFT)
    generator = torch.Generator().manual_seed(seed)
    drawn = ids[torch.multinomial(weight, count * length, replacement=True, generator=generator)]
    windows = drawn.reshape(count, length)
    windows[:, : len(before)] = torch.tensor(before, dtype=torch.long)
    if after:
        windows[:, -len(after) :] = torch.tensor(after, dtype=torch.long)
    return windows


def not_words(tokens: Sequence[str | None]) -> tuple[list[int], bool]:
    """Ids that are no words of a text: names in brackets, single characters, blanks; and whether it is an alphabet.

    Vocabularies begin with them, whatever their frequency. In an alphabet (amino acids) single characters are all there
    is, in no order of frequency.

    >>> not_words(["<s>", "a", "b", "Ġthe", "ing", "ĠĠ"])
    ([0, 1, 2, 5], False)
    >>> not_words(["[CLS]", "A", "C", "D"])
    ([0], True)
    """
    named = [number for number, token in enumerate(tokens) if token is None or re.fullmatch(r"[<\[].*[>\]]", token)]
    blank = [number for number, token in enumerate(tokens) if token is not None and not token.strip(BLANKS)]
    single = [number for number, token in enumerate(tokens) if token is not None and len(token) == 1]
    if len({*named, *blank, *single}) == len(tokens):
        return sorted({*named, *blank}), True
    return sorted({*named, *blank, *single}), False
