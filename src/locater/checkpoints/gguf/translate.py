"""Map stored tensors to the model's own, with the change that each needs."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from ...errors import Refusal
from ...records import Json
from .architectures import ARCHITECTURES
from .changes import Change, Joined, Permuted, Regrouped, Shape, Shifted, Transposed
from .config import architecture_of, num_heads
from .names import Architecture

BLOCK = re.compile(r"blk\.(\d{1,6})\.(\w+)((?:\.\w+)*)")
# Parts of attention that act on logits; values, outputs and rotary tables, which follow from the settings, do not.
ACTING = re.compile(r"attn_(?!v|output|sub_norm|rot_embd)")
TOP = re.compile(r"(\w+)\.(weight|bias)")
# Two parts of falcon's later layout: their names tell that the one norm of the earlier is not meant.
TWO_NORMS = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}


class Translated(NamedTuple):
    """One tensor of the model: its shape, the stored tensors it comes from, and what undoes the converter's change."""

    shape: Shape
    sources: tuple[str, ...]
    change: Change | None


def translate(settings: Json, shapes: Mapping[str, Shape]) -> dict[str, Translated]:
    """The model's tensors by name; a tensor that the tables do not know keeps its stored name and layout."""
    name = architecture_of(settings)
    row = ARCHITECTURES.get(name)
    result: dict[str, Translated] = {}
    for stored in shapes:
        renamed, sources, change = (stored, (stored,), None)
        if row is not None:
            renamed, sources, change = _translate_one(row, settings, shapes, stored)
        result.setdefault(renamed, _checked(sources, change, shapes))
    return result


def _translate_one(
    row: Architecture, settings: Json, shapes: Mapping[str, Shape], stored: str
) -> tuple[str, tuple[str, ...], Change | None]:
    if top := TOP.fullmatch(stored):
        change = Shifted() if row.has_shifted_norms and stored == "output_norm.weight" else None
        return f"{row.top[top[1]]}.{top[2]}" if top[1] in row.top else stored, (stored,), change
    block = BLOCK.fullmatch(stored)
    if not block:
        return stored, (stored,), None
    layer, stem, suffix = int(block[1]), block[2], block[3].removeprefix(".")
    prefix = row.layer.format(layer)
    if stem == "attn_k_b" and (value := f"blk.{layer}.attn_v_b.weight") in shapes:
        return f"{prefix}self_attn.kv_b_proj.weight", (stored, value), Joined()
    names = row.block
    if row.model_type == "falcon" and f"blk.{layer}.attn_norm_2.weight" in shapes:
        names = {**names, **TWO_NORMS}
    if stem not in names:
        # Put beside the queries, where a scan looks for what no row knows, and not lost under its own name.
        known = f"{prefix}{_attention(row)}.{stored.split('.', 2)[2]}" if ACTING.match(stem) else stored
        return known, (stored,), None
    # Attention sinks are a parameter of their module: nothing follows their name.
    ending = f".{suffix}" if suffix and stem != "attn_sinks" else ""
    return f"{prefix}{names[stem]}{ending}", (stored,), _change(row, settings, layer, stem, suffix)


def _attention(row: Architecture) -> str:
    """The module that holds the queries, or their own where a layer holds them itself."""
    module = next(row.block[stem] for stem in ("attn_q", "attn_qkv", "attn_q_b") if stem in row.block)
    return module.rpartition(".")[0] or module


def _change(row: Architecture, settings: Json, layer: int, stem: str, suffix: str) -> Change | None:
    if suffix not in ("", "weight", "bias"):
        return None
    if row.is_permuted and stem in ("attn_q", "attn_k"):
        return Permuted(num_heads(settings, layer)[stem == "attn_k"])
    if row.is_regrouped and stem == "attn_qkv":
        return Regrouped(*num_heads(settings, layer))
    if suffix == "weight" and stem in row.transposed:
        return Transposed()
    if suffix == "weight" and row.has_shifted_norms and stem.endswith("norm"):
        return Shifted()
    return None


def _checked(sources: tuple[str, ...], change: Change | None, shapes: Mapping[str, Shape]) -> Translated:
    if change is None:
        return Translated(shapes[sources[0]], sources, None)
    try:
        return Translated(change.shape(*(shapes[source] for source in sources)), sources, change)
    except Refusal as cause:
        raise Refusal(f"{sources[0][:80]}: {cause}") from None
