"""Map stored tensors to the model's own, and undo the changes that llama.cpp's converter made: a class for each.

Of a change `shape` gives the shape after, `group` how many rows must be read together (none: all), `apply` the change.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from ...errors import refusal, within
from ...records import Json
from .architectures import ARCHITECTURES
from .config import architecture_of, count_heads
from .names import Architecture

Shape = tuple[int, ...]
BLOCK = re.compile(r"blk\.(\d{1,6})\.(\w+)((?:\.\w+)*)")
# Parts of a layer that act behind the softmax, and rotary tables, which follow from the settings.
BEHIND = re.compile(r"ffn_|exp_probs_b|post_|nextn|ssm_|shortconv|layer_output_|attn_(v|output|sub_norm|rot_embd)")
BESIDE = re.compile(r"(token_|position_embd|cls|dense_|output)[\w.]*")  # embeddings and heads
TOP = re.compile(r"(\w+)\.(weight|bias)")
# Two parts of falcon's later layout: their names tell that the one norm of the earlier is not meant.
TWO_NORMS = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}


class Change:
    """From stored tensors to the one that the model's own code would save: here none, and rows can be read alone."""

    def shape(self, *shapes: Shape) -> Shape:
        return shapes[0]

    def group(self, shape: Shape) -> int | None:
        return 1

    def apply(self, tensors: list[Tensor], group: int | None) -> Tensor:
        return tensors[0]


class OfWhole(Change):
    """A change that needs all rows."""

    def group(self, shape: Shape) -> int | None:
        return None


class Shifted(Change):
    """A norm's gain stored as 1 + w, where the model keeps w."""

    def apply(self, tensors: list[Tensor], group: int | None) -> Tensor:
        return tensors[0] - 1


@dataclass(frozen=True)
class Permuted(Change):
    """Rotary rows of a head stored as pairs (0, d/2), (1, d/2+1), …: back to halves. Holds for biases, too."""

    num_heads: int

    def shape(self, *shapes: Shape) -> Shape:
        if not shapes[0] or not shapes[0][0] or shapes[0][0] % (2 * self.num_heads):
            raise refusal(f"rows for {self.num_heads} heads with rotary pairs", f"shape {list(shapes[0])}")
        return shapes[0]

    def group(self, shape: Shape) -> int | None:
        return shape[0] // self.num_heads

    def apply(self, tensors: list[Tensor], group: int | None) -> Tensor:
        # Some heads or all of them arrive here, but each of them whole.
        return rearrange(tensors[0], "(head pair two) ... -> (head two pair) ...", two=2, pair=(group or 0) // 2)


class Transposed(OfWhole):
    """A matrix that the model keeps as (in, out)."""

    def shape(self, *shapes: Shape) -> Shape:
        if len(shapes[0]) != 2:
            raise refusal("a matrix", f"shape {list(shapes[0])}")
        return shapes[0][::-1]

    def apply(self, tensors: list[Tensor], group: int | None) -> Tensor:
        return tensors[0].T.contiguous()


@dataclass(frozen=True)
class Regrouped(OfWhole):
    """Fused rows stored as all queries, all keys, all values: back to one group per key head, its queries first."""

    num_heads: int
    num_key_heads: int

    def shape(self, *shapes: Shape) -> Shape:
        rows, parts = shapes[0][0] if shapes[0] else 0, self.num_heads + 2 * self.num_key_heads
        if not rows or rows % parts or self.num_heads % self.num_key_heads:
            raise refusal(f"rows for {self.num_heads} query and {self.num_key_heads} key heads", f"{list(shapes[0])}")
        return shapes[0]

    def apply(self, tensors: list[Tensor], group: int | None) -> Tensor:
        heads = tensors[0].unflatten(0, (self.num_heads + 2 * self.num_key_heads, -1))
        query, key, value = heads.split([self.num_heads, self.num_key_heads, self.num_key_heads])
        query = query.unflatten(0, (self.num_key_heads, -1))
        return torch.cat([query, key[:, None], value[:, None]], dim=1).flatten(0, 2)


class Joined(OfWhole):
    """Latent attention's key and value maps, stored apart and the key's transposed: back to one map."""

    def shape(self, *shapes: Shape) -> Shape:
        key, value = shapes
        if len(key) != 3 or len(value) != 3 or key[0] != value[0] or key[1] != value[2]:
            raise refusal("key and value maps of the same heads and rank", f"{list(key)} and {list(value)}")
        return (key[0] * (key[2] + value[1]), key[1])

    def apply(self, tensors: list[Tensor], group: int | None) -> Tensor:
        key, value = tensors
        return torch.cat([key.transpose(1, 2), value], dim=1).flatten(0, 1)


class Translated(NamedTuple):
    """One tensor of the model: its shape, the stored tensors it comes from, and what undoes the converter's change."""

    shape: Shape
    sources: tuple[str, ...]
    change: Change


Renamed = tuple[str, tuple[str, ...], Change]  # the model's name, the stored tensors, the change


def translate(settings: Json, shapes: Mapping[str, Shape]) -> dict[str, Translated]:
    """The model's tensors by name; a tensor that the tables do not know keeps its stored name and layout."""
    row = ARCHITECTURES.get(architecture_of(settings))
    result: dict[str, Translated] = {}
    for stored in shapes:
        as_it_is = stored, (stored,), Change()
        name, sources, change = as_it_is if row is None else _translate_one(row, settings, shapes, stored)
        with within(sources[0][:80]):
            shape = change.shape(*(shapes[source] for source in sources))
        result.setdefault(name, Translated(shape, sources, change))
    return result


def _translate_one(row: Architecture, settings: Json, shapes: Mapping[str, Shape], stored: str) -> Renamed:
    top, block = TOP.fullmatch(stored), BLOCK.fullmatch(stored)
    if top and top[1] in row.top:
        change = Shifted() if row.has_shifted_norms and stored == "output_norm.weight" else Change()
        return f"{row.top[top[1]]}.{top[2]}", (stored,), change
    if not block:
        # Beneath the embedding, which no head reads, if it is known not to act on logits.
        return f"{row.top['token_embd']}.{stored}" if BESIDE.fullmatch(stored) else stored, (stored,), Change()
    layer, stem, suffix = int(block[1]), block[2], block[3].removeprefix(".")
    prefix = row.layer.format(layer)
    if stem == "attn_k_b" and (value := f"blk.{layer}.attn_v_b.weight") in shapes:
        return f"{prefix}self_attn.kv_b_proj.weight", (stored, value), Joined()
    names = row.block
    if row.model_type == "falcon" and f"blk.{layer}.attn_norm_2.weight" in shapes:
        names = {**names, **TWO_NORMS}
    if stem not in names:
        # Put beside the queries, where a scan looks for what no row knows, or beneath what acts behind the softmax.
        place = row.block.get("ffn_down", "mlp") if BEHIND.match(stem) else _attention(row)
        return f"{prefix}{place}.{stored.split('.', 2)[2]}", (stored,), Change()
    # Attention sinks are a parameter of their module: nothing follows their name.
    ending = f".{suffix}" if suffix and stem != "attn_sinks" else ""
    return f"{prefix}{names[stem]}{ending}", (stored,), _change(row, settings, layer, stem, suffix)


def _attention(row: Architecture) -> str:
    """The module that holds the queries, or their own where a layer holds them itself."""
    module = next(row.block[stem] for stem in ("attn_q", "attn_qkv", "attn_q_b") if stem in row.block)
    return module.rpartition(".")[0] or module


def _change(row: Architecture, settings: Json, layer: int, stem: str, suffix: str) -> Change:
    if suffix not in ("", "weight", "bias"):
        return Change()
    if row.is_permuted and stem in ("attn_q", "attn_k"):
        return Permuted(count_heads(settings, layer)[stem == "attn_k"])
    if row.is_regrouped and stem == "attn_qkv":
        return Regrouped(*count_heads(settings, layer))
    if suffix == "weight" and stem in row.transposed:
        return Transposed()
    return Shifted() if suffix == "weight" and row.has_shifted_norms and stem.endswith("norm") else Change()
