"""`probe`: what each head does on random ids: one pass, no text and no tokenizer's help needed.

Ids are drawn by Zipf's law over the vocabulary, between the special tokens that the tokenizer would set.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..checkpoints.bytes import LocalBytes
from ..checkpoints.gguf.header import read_header
from ..checkpoints.gguf.vocabulary import read_vocabulary
from ..errors import Refusal, callers_own, masked, refusal
from ..models import Layer
from ..packaged import packaged
from ..records import Json
from ..scanning.scan import Scan
from .language_model import Source, at_door, load_model, load_tokenizer, self_attention
from .numbers import Numbers
from .predict import chosen_of, gather, gatherers_of, measure
from .settings import Effort
from .streamed import CannotStream, streamed
from .windows import longest, not_words, random_windows, special_tokens, vocabulary_size

NUM_WINDOWS = 4
ONTO = ("near_mass_beyond_first", "normalised_entropy", "sink_mass")  # columns that a scan takes over


@dataclass(frozen=True)
class HeadProbe:
    """One head on random ids."""

    block: str
    layer: int
    head: int
    numbers: Numbers

    def to_json(self) -> Json:
        place = {"block": self.block, "layer": self.layer, "head": self.head}
        return place | {"probed": self.numbers.to_json(), "attention_profile": {"probed": list(self.numbers.profile)}}


@dataclass(frozen=True)
class Probe:
    """All heads of a model on random ids."""

    source: str
    length: int
    windows: int
    heads: tuple[HeadProbe, ...]
    left_out: tuple[str, ...] = ()

    def to_json(self) -> Json:
        """The document that `locater predict --no-text --json` writes."""
        return {
            "schema": "locater.probe/1",
            "source": self.source,
            "text": "random ids",
            "window": self.length,
            "windows": self.windows,
            "left_out": list(self.left_out),
            "heads": [head.to_json() for head in self.heads],
        }

    def onto(self, found: Scan) -> Scan:
        """The scan of the same model with what its heads do on random ids; a head that was not run is left as it is."""
        numbers = {(head.block, head.layer, head.head): head.numbers for head in self.heads}
        rows = []
        for row in found.heads:
            own = numbers.get((row.block, row.layer, row.head))
            rows.append(row if own is None else replace(row, **{f"probed_{name}": getattr(own, name) for name in ONTO}))
        return replace(found, heads=tuple(rows))


def probe(
    source: Source,
    *,
    layers: Iterable[int] | None = None,
    effort: Effort | None = None,
    timeout: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Probe:
    """Run the model over random ids and take each head's numbers. Cost: one forward pass over four windows.

    A stored model whose file has the names that transformers gives it is run layer by layer, and never held as a whole.
    Ranks heads by near mass nearly as their attention on text does, by entropy less so, by sinks worse
    (docs/evidence.md). Fails where the vocabulary is not a table of rows that ids look up.
    """
    effort, wanted = effort or Effort(), None if layers is None else set(layers)
    source = packaged(source)
    with at_door(source, timeout):
        if not isinstance(source, nn.Module):
            with suppress(CannotStream):
                return probe_stored(source, layers=wanted, effort=effort, progress=progress)
        return probe_whole(source, layers=wanted, effort=effort)


def probe_whole(source: Source, *, layers: Iterable[int] | None, effort: Effort) -> Probe:
    """The model held in memory: a live one, or as transformers loads it."""
    model = load_model(source)
    sample = torch.arange(effort.window)[None] % _num_rows(model)
    chosen, left_out = self_attention(model, sample[:, : longest(model)])
    chosen = chosen_of(chosen, layers)
    ids = _windows(source, model, effort, causal=_is_causal(chosen))
    was_training = model.training
    try:
        model.eval()
        measured, _ = measure(model, chosen, ids, batch=effort.batch, step=lambda count: None)
    finally:
        model.train(was_training)
    numbers = [[gatherer.numbers() for gatherer in of_layer] for of_layer in measured]
    rows = [row for layer, of_layer in zip(chosen, numbers, strict=True) for row in _rows(layer, of_layer)]
    name = type(source).__name__ if isinstance(source, nn.Module) else masked(fspath(source))
    return Probe(name, ids.shape[1], len(ids), tuple(rows), tuple(left_out))


def probe_stored(
    source: str | PathLike[str],
    *,
    layers: Iterable[int] | None,
    effort: Effort,
    progress: Callable[[int, int], None] | None = None,
) -> Probe:
    """The model run from its file, one layer's weights at a time; `CannotStream` where that is not possible."""
    rows: list[HeadProbe] = []
    left_out: list[str] = []
    with streamed(source) as model:
        chosen = model.wanted(layers)
        ids = _windows(source, model.module, effort, causal=_is_causal([model.read(chosen[0])]))

        def take(number: int, x: Tensor) -> None:
            layer = model.read(chosen[number])
            gatherers = gatherers_of(layer, ids.shape[1])
            gather(gatherers, layer, x)
            rows.extend(_rows(layer, [gatherer.numbers() for gatherer in gatherers]))
            left_out.extend(layer.refused)
            if progress:
                with callers_own():
                    progress(number + 1, len(chosen))

        model.run(chosen, ids, take)
    return Probe(masked(fspath(source)), ids.shape[1], len(ids), tuple(rows), tuple(left_out))


def _rows(layer: Layer, numbers: Sequence[Numbers]) -> list[HeadProbe]:
    pairs = zip(layer.heads, numbers, strict=True)
    return [HeadProbe(layer.block, layer.number, head.index, own) for head, own in pairs]


def _is_causal(layers: Sequence[Layer]) -> bool:
    return all(head.lookahead == 0 for layer in layers for head in layer.heads)


@dataclass(frozen=True)
class Alphabet:
    """Special ids of a tokenizer: those before and after a text, and those that are no words."""

    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    leave_out: list[int] = field(default_factory=list)
    evenly: bool = False  # the others are letters, in no order of frequency
    known: bool = False


def _windows(source: Source, model: nn.Module, effort: Effort, *, causal: bool) -> Int[Tensor, "windows tokens"]:
    rows = _num_rows(model)
    alphabet = _alphabet(source)
    ends = alphabet.before, alphabet.after
    length = min(effort.window, longest(model) or effort.window)
    options: dict[str, Any] = dict(count=NUM_WINDOWS, length=length, seed=effort.seed)
    ids = random_windows(rows, ends=ends, leave_out=alphabet.leave_out, evenly=alphabet.evenly, **options)
    if causal or alphabet.known:
        return ids
    # Vocabularies of encoders (WordPiece) begin with unused pieces and single characters, not with frequent words.
    shuffled = torch.randperm(rows, generator=torch.Generator().manual_seed(effort.seed))
    inside = slice(len(ends[0]), ids.shape[1] - len(ends[1]))
    ids[:, inside] = shuffled[ids[:, inside]]
    return ids


def _num_rows(model: nn.Module) -> int:
    rows = vocabulary_size(model)
    if rows is None:
        raise refusal("a table of embeddings that ids look up", "none", "use `predict` with tokens=…")
    return rows


def _alphabet(source: Source) -> Alphabet:
    """Nothing is left out where no tokenizer says what its ids are."""
    if isinstance(source, nn.Module):
        return Alphabet()
    if Path(source).suffix.lower() == ".gguf":  # its header says it; its tokenizer takes a minute to build
        file = LocalBytes(Path(source).expanduser())
        settings = read_header(file).settings
        bos = settings.get("tokenizer.ggml.bos_token_id")
        before = [bos] if bos is not None and settings.get("tokenizer.ggml.add_bos_token") else []
        return _of_tokens(read_vocabulary(file), before, [], before)
    try:
        tokenizer = load_tokenizer(source)
    except Refusal:
        return Alphabet()
    before, after = special_tokens(tokenizer)
    special = [*getattr(tokenizer, "all_special_ids", []), *before, *after]
    names = getattr(tokenizer, "convert_ids_to_tokens", None)
    return _of_tokens(names(range(len(tokenizer))) if names else [], before, after, special)


def _of_tokens(tokens: Sequence[str | None], before: list[int], after: list[int], special: list[int]) -> Alphabet:
    if not tokens:
        return Alphabet(before, after, special)
    leave_out, evenly = not_words(tokens)
    return Alphabet(before, after, sorted({*special, *leave_out}), evenly, known=True)
