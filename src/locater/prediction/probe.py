"""`probe`: what each head does on random ids: one pass, no text and no tokenizer's help needed.

Ids are drawn by Zipf's law over the vocabulary, between the special tokens that the tokenizer would set.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from os import fspath
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..checkpoints.bytes import LocalBytes
from ..checkpoints.gguf.header import read_header
from ..errors import Refusal, refusal
from ..models import Layer
from ..records import Json
from .language_model import Source, load_model, load_tokenizer, self_attention
from .numbers import Numbers
from .predict import measure, wanted_layers
from .settings import Effort
from .windows import random_windows, special_tokens, vocabulary_size

NUM_WINDOWS = 4


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


def probe(source: Source, *, layers: Iterable[int] | None = None, effort: Effort | None = None) -> Probe:
    """Run the model over random ids and take each head's numbers. Cost: one forward pass over four windows.

    Ranks heads by near mass nearly as their attention on text does, by entropy less so, by sinks worse
    (docs/evidence.md). Fails where the vocabulary is not a table of rows that ids look up.
    """
    effort = effort or Effort()
    model = load_model(source)
    chosen, left_out = self_attention(model)
    chosen = wanted_layers(chosen, layers)
    ids = _windows(source, model, chosen, effort)
    was_training = model.training
    try:
        model.eval()
        measured, _ = measure(model, chosen, ids, batch=effort.batch, step=lambda count: None)
    finally:
        model.train(was_training)
    rows = [
        HeadProbe(layer.block, layer.number, head.index, numbers)
        for layer, of_layer in zip(chosen, measured, strict=True)
        for head, numbers in zip(layer.heads, of_layer, strict=True)
    ]
    name = type(source).__name__ if isinstance(source, nn.Module) else fspath(source)
    return Probe(name, ids.shape[1], len(ids), tuple(rows), tuple(left_out))


def _windows(source: Source, model: nn.Module, layers: list[Layer], effort: Effort) -> Int[Tensor, "windows tokens"]:
    rows = vocabulary_size(model)
    if rows is None:
        raise refusal("a table of embeddings that ids look up", "none", "give windows of ids with tokens=")
    before, after, special = _special(source)
    config = getattr(model, "config", None)
    most = getattr(config, "max_position_embeddings", None) or getattr(config, "context", None) or effort.window
    options: dict[str, Any] = dict(
        count=NUM_WINDOWS, length=min(effort.window, most), ends=(before, after), leave_out=special
    )
    ids = random_windows(rows, **options, seed=effort.seed)
    if all(head.lookahead == 0 for layer in layers for head in layer.heads):
        return ids
    # Vocabularies of encoders (WordPiece) begin with unused pieces and single characters, not with frequent words.
    shuffled = torch.randperm(rows, generator=torch.Generator().manual_seed(effort.seed))
    inside = slice(len(before), ids.shape[1] - len(after))
    ids[:, inside] = shuffled[ids[:, inside]]
    return ids


def _special(source: Source) -> tuple[list[int], list[int], list[int]]:
    """Special tokens before and behind a text, and all of them; none where no tokenizer says so."""
    if isinstance(source, nn.Module):
        return [], [], []
    if Path(source).suffix.lower() == ".gguf":  # its header says it; its tokenizer takes a minute to build
        settings = read_header(LocalBytes(Path(source).expanduser())).settings
        bos = settings.get("tokenizer.ggml.bos_token_id")
        before = [bos] if bos is not None and settings.get("tokenizer.ggml.add_bos_token") else []
        return before, [], before
    try:
        tokenizer = load_tokenizer(source)
    except Refusal:
        return [], [], []
    before, after = special_tokens(tokenizer)
    return before, after, [*getattr(tokenizer, "all_special_ids", []), *before, *after]
