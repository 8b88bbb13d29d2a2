"""LoRA adapters, merged on reading: W + s·B·A, for the rows asked for and nothing else. The base stays as it is."""

import math
import re
from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor

from ..budget import budget
from ..errors import Refusal, refusal
from ..records import Json, JsonMapping
from .base import Checkpoint, Entry, Rows
from .bytes import Folder
from .document import read_object
from .safetensors import SafetensorsFile
from .torch.file import open_torch

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.default)?(?:\.weight)?")
# Variants that are more than W + s·B·A.
BEYOND = ("use_dora", "use_qalora", "lora_bias", "layer_replication", "target_parameters", "trainable_token_indices")
BEYOND += ("alora_invocation_tokens", "arrow_config", "use_bdlora", "kasa_config")
# Patterns of strangers are matched only if they cannot take for ever: one star, and names of a usual length.
LONGEST_MODULE = 300
HARMLESS = re.compile(r"[\w.\\^$*-]{1,200}")


@dataclass(frozen=True)
class Pair:
    """The factors of one weight, by their names in the adapter; `is_flipped` where the weight is kept as (in, out)."""

    down: str
    up: str
    scale: float
    is_flipped: bool


class Adapted(Checkpoint):
    """A base with an adapter: reading a changed weight costs its rows and both factors."""

    def __init__(self, base: Checkpoint, adapter: Checkpoint, settings: JsonMapping) -> None:
        self.base, self.adapter, self.format = base, adapter, base.format
        self.pairs, self.replaced = _match(base, adapter, settings)
        entries = dict(base.entries) | {name: adapter.entries[stored] for name, stored in self.replaced.items()}
        super().__init__(entries, config=base.config, place=base.place)

    def fetch(self, name: str, rows: Rows | None) -> Shaped[Tensor, "..."]:
        if name in self.replaced:
            return self.adapter.read(self.replaced[name], rows)
        weight = self.base.read(name, rows)
        if name not in self.pairs:
            return weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        return (weight.to(wide) + self._change(self.pairs[name], rows).to(wide)).to(weight.dtype)

    def _change(self, pair: Pair, rows: Rows | None) -> Tensor:
        """Rows of s·B·A, or of its transpose."""
        down, up = (_wide(self.adapter.read(stored)) for stored in (pair.down, pair.up))
        down, up = (factor.to(torch.promote_types(down.dtype, up.dtype)) for factor in (down, up))
        left, right = (down.T, up.T) if pair.is_flipped else (up, down)
        return pair.scale * (left if rows is None else left[rows[0] : rows[1]]) @ right

    def close(self) -> None:
        self.base.close()
        self.adapter.close()


def read_settings(folder: Folder) -> Json | None:
    """`adapter_config.json`, or nothing where there is none; fails on what is not plain LoRA."""
    source = folder.find(CONFIG)
    if source is None:
        return None
    settings = read_object(source)
    if settings.get("peft_type") != "LORA":
        raise refusal("an adapter of the kind LORA", f"{settings.get('peft_type')!r:.40}", "merge it with peft first")
    if beyond := [key for key in BEYOND if settings.get(key)]:
        raise refusal("a plain LoRA adapter", f"one with {beyond[0]}", "merge it with peft first, and open the result")
    return settings


def open_adapter(base: Checkpoint, folder: Folder, *, allow_pickle: bool) -> Adapted:
    """The base with the adapter of a folder on top of it."""
    settings = read_settings(folder)
    source = next((found for name in WEIGHTS if (found := folder.find(name)) is not None), None)
    if settings is None or source is None:
        missing = CONFIG if settings is None else WEIGHTS[0]
        raise refusal(f"{missing} in {folder.place}", "no such file", "name the directory that peft saved")
    if source.name.endswith(".safetensors"):
        return Adapted(base, SafetensorsFile(source, config={}), settings)
    return Adapted(base, open_torch(source, config={}, allow_pickle=allow_pickle), settings)


def _match(base: Checkpoint, adapter: Checkpoint, settings: JsonMapping) -> tuple[dict[str, Pair], dict[str, str]]:
    factors: dict[str, dict[str, str]] = {}
    replaced: dict[str, str] = {}
    for stored in adapter.names:
        bare = stored.removeprefix("base_model.model.")
        if found := FACTOR.fullmatch(bare):
            factors.setdefault(found["module"], {})[found["side"]] = stored
        elif "lora_" in bare:
            raise refusal("factors A and B in the adapter", f"{stored[:120]!r}", "merge it with peft first")
        else:
            replaced[_find(base, bare.replace(".modules_to_save.default", "")) or bare] = stored
    pairs = {}
    for module, sides in factors.items():
        name = _find(base, f"{module}.weight")
        if name is None or set(sides) != {"A", "B"}:
            cause = "factors A and B" if name else "the weight it changes in the base"
            raise refusal(f"{cause} for {module[:120]!r}", "none", "check that adapter and base belong together")
        pairs[name] = _pair(base, adapter, settings, name, module, sides)
    return pairs, replaced


def _pair(
    base: Checkpoint, adapter: Checkpoint, settings: JsonMapping, name: str, module: str, sides: dict[str, str]
) -> Pair:
    down, up, weight = adapter.entries[sides["A"]], adapter.entries[sides["B"]], base.entries[name]
    straight = _product_shape(up, down)
    kinds = (one.dtype for one in (up, down, weight))
    if bad := next((kind for kind in kinds if not kind.is_floating_point or kind.itemsize < 2), None):
        raise refusal(f"factors and a weight of at least 16 bits for {module[:120]!r}", bad, "merge it with peft first")
    if straight is None or weight.shape not in (straight, straight[::-1]):
        got = f"{list(up.shape)} times {list(down.shape)}"
        raise refusal(f"factors whose product has shape {list(weight.shape)} for {module[:120]!r}", got)
    # A square weight fits both ways: only the settings tell. Embeddings are always kept as (in, out).
    wants_flip = bool(settings.get("fan_in_fan_out")) or "lora_embedding_" in sides["A"]
    is_flipped = wants_flip if straight == straight[::-1] else weight.shape != straight
    return Pair(sides["A"], sides["B"], _scale(settings, module, rank=down.shape[0]), is_flipped)


def _product_shape(up: Entry, down: Entry) -> tuple[int, int] | None:
    if len(up.shape) != 2 or len(down.shape) != 2 or up.shape[1] != down.shape[0] or not down.shape[0]:
        return None
    return up.shape[0], down.shape[1]


def _scale(settings: JsonMapping, module: str, *, rank: int) -> float:
    """alpha / r, or alpha / √r for rank-stabilised adapters; alpha may depend on the module."""
    alpha = settings.get("lora_alpha", 8)
    patterns = settings.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise refusal(f"a mapping as alpha_pattern in {CONFIG}", f"{patterns!r:.60}")
    budget().check("patterns", len(patterns))
    for pattern, value in patterns.items():
        if not HARMLESS.fullmatch(pattern) or pattern.count("*") > 1 or len(module) > LONGEST_MODULE:
            raise refusal(f"simple patterns in {CONFIG}", f"{pattern!r:.80}", "merge it with peft first")
        if _matches(pattern, module):
            alpha = value
            break
    if type(alpha) not in (int, float) or not abs(alpha) < 1e30:
        raise refusal(f"a number as lora_alpha in {CONFIG}", f"{alpha!r:.40}")
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except re.error as cause:
        raise Refusal(f"expected a pattern in {CONFIG}, got {pattern[:80]!r} ({cause})") from None


def _find(base: Checkpoint, name: str) -> str | None:
    """The base's name: models are saved with or without the name of what holds their layers."""
    candidates = (name, name.partition(".")[2], f"model.{name}", f"transformer.{name}")
    return next((candidate for candidate in candidates if candidate in base.entries), None)


def _wide(factor: Tensor) -> Tensor:
    return factor.to(torch.promote_types(factor.dtype, torch.float32))
