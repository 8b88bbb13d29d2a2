"""LoRA adapters, merged on reading: W + s·B·A, for the rows asked for and nothing else. The base stays as it is."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from ..budget import budget
from ..errors import instead, missing, refusal
from ..records import Json, JsonMapping
from .base import Checkpoint, Entry, Rows
from .bytes import ByteSource, Folder, read_settings
from .sharded import ADAPTER

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.default)?(?:\.weight)?")
# Settings that are read here, and those that say where factors came from and not what they mean. Whatever else is set
# may make the adapter more than W + s·B·A, or may have changed the base: it is refused by name.
READ = (
    "peft_type", "r", "rank_pattern", "lora_alpha", "alpha_pattern", "use_rslora", "fan_in_fan_out",
    "init_lora_weights", "modules_to_save", "base_model_name_or_path",
)  # fmt: skip
ASIDE = (
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "target_modules", "exclude_modules",
    "lora_dropout", "bias", "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size", "eva_config",
    "corda_config", "loftq_config", "lora_ga_config", "runtime_config", "ensure_weight_tying",
)  # fmt: skip
# Ways to begin that leave the base as it was; PiSSA, OLoRA, CorDA, LoRA-GA and LoftQ take something off it.
STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
BIASES = ("none", "all", "lora_only")
ALL = "all-linear"  # peft's word for every projection
OUTPUT = "lm_head"  # saved beside resized embeddings, where the base has it tied to them and does not store it
# Untrusted patterns are matched only if they cannot take for ever: one star, and names of a usual length.
LONGEST_MODULE = 300
HARMLESS = re.compile(r"[\w.\\^$*-]{1,200}")


@dataclass(frozen=True)
class FactorPair:
    """The factors of one weight, by their names in the adapter; `is_flipped` where the weight is kept as (in, out)."""

    down: str
    up: str
    scale: float
    is_flipped: bool


class Adapted(Checkpoint):
    """A base with an adapter: reading a changed weight costs its rows and both factors."""

    def __init__(self, base: Checkpoint, adapter: Checkpoint, settings: JsonMapping) -> None:
        self.base, self.adapter, self.format = base, adapter, base.format
        factors, self.replaced = _match(base, adapter, settings)
        entries = dict(base.entries) | {name: adapter.entries[stored] for name, stored in self.replaced.items()}
        self.pairs = {name: _pair(entries[name], adapter, settings, *factor) for name, factor in factors.items()}
        _check_orientation(entries, self.pairs)
        super().__init__(entries, config=base.config, place=base.place, parts=[base, adapter])

    def fetch(self, name: str, rows: Rows | None) -> Shaped[Tensor, "..."]:
        weight = self.adapter.read(self.replaced[name], rows) if name in self.replaced else self.base.read(name, rows)
        if name not in self.pairs:
            return weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        return (weight.to(wide) + self._change(self.pairs[name], rows).to(wide)).to(weight.dtype)

    def _change(self, pair: FactorPair, rows: Rows | None) -> Tensor:
        """Rows of s·B·A, or of its transpose."""
        down, up = (self.adapter.read(stored) for stored in (pair.down, pair.up))
        wide = torch.promote_types(torch.promote_types(down.dtype, up.dtype), torch.float32)
        down, up = down.to(wide), up.to(wide)
        left, right = (down.T, up.T) if pair.is_flipped else (up, down)
        return pair.scale * (left if rows is None else left[rows[0] : rows[1]]) @ right


def read_adapter_settings(folder: Folder) -> Json | None:
    """`adapter_config.json`, or nothing where there is none; fails on what is not plain LoRA."""
    source = folder.find(ADAPTER)
    if source is None:
        return None
    settings = read_settings(source)
    if settings.get("peft_type") != "LORA":
        raise refusal("an adapter of the kind LORA", f"{settings.get('peft_type')!r:.40}", "merge it with peft first")
    remedy = "merge it with peft first, and open the result"
    if beyond := [key for key, value in settings.items() if value and key not in READ + ASIDE]:
        raise refusal("a plain LoRA adapter", f"one with {beyond[0][:60]}", remedy)
    if (start := settings.get("init_lora_weights", True)) not in STARTS:
        expected = f"an adapter that left its base as it was ({', '.join(map(str, STARTS))} as init_lora_weights)"
        raise refusal(expected, f"{start!r:.40}", remedy)
    if (bias := settings.get("bias") or "none") not in BIASES:
        raise refusal(f"one of {', '.join(BIASES)} as bias in {ADAPTER}", f"{bias!r:.40}", remedy)
    return settings


def find_adapter(folder: Folder) -> tuple[Json, ByteSource]:
    """The settings and the factors of an adapter's folder."""
    settings = read_adapter_settings(folder)
    source = next((found for name in WEIGHTS if (found := folder.find(name)) is not None), None)
    if settings is None or source is None:
        file = ADAPTER if settings is None else WEIGHTS[0]
        raise missing(f"the file {file} in {folder.place}", "name the directory that peft saved")
    return settings, source


Factors = dict[str, tuple[str, dict[str, str]]]  # by the changed weight: its module in the adapter, its two factors


def _match(base: Checkpoint, adapter: Checkpoint, settings: JsonMapping) -> tuple[Factors, dict[str, str]]:
    """Match the adapter's tensors to the weights it changes and those it replaces; none may be left over."""
    factors: dict[str, dict[str, str]] = {}
    replaced: dict[str, str] = {}
    for stored in adapter.names:
        bare = stored.removeprefix("base_model.model.")
        if match := FACTOR.fullmatch(bare):
            sides = factors.setdefault(match["module"], {})
            _check_once(match["side"] not in sides, stored)
            sides[match["side"]] = stored
        elif "lora_" in bare:
            raise refusal("factors A and B in the adapter", f"{stored[:120]!r}", "merge it with peft first")
        else:
            replaced[_find_replaced(base, bare, settings, replaced)] = stored
    changed: Factors = {}
    for module, sides in factors.items():
        if not _is_targeted(module, settings):
            remedy = "peft would leave it out; save the adapter again"
            raise refusal(f"factors of modules that {ADAPTER} names alone", f"{module[:120]!r}", remedy)
        name = _find(base, f"{module}.weight")
        if name is None or set(sides) != {"A", "B"}:
            cause = "factors A and B" if name else "the weight it changes in the base"
            raise missing(f"{cause} for {module[:120]!r}", "check that adapter and base belong together")
        _check_once(name not in changed, sides["A"])
        changed[name] = module, sides
    return changed, replaced


def _is_targeted(module: str, settings: JsonMapping) -> bool:
    """Tell whether peft makes factors for this module; of patterns that may take for ever nothing is known."""
    wanted = settings.get("target_modules")
    if _is_named(module, settings.get("exclude_modules")):
        return False
    if isinstance(wanted, list) and module not in wanted and not _is_in_layers(module, settings):
        return False
    return _is_named(module, wanted) is not False


def _is_named(module: str, names: Any) -> bool | None:
    """By a pattern of the whole name, or by a list of its ends; None where nothing is stated, or no simple pattern."""
    if isinstance(names, list) and names:
        return any(f".{module}".endswith(f".{name}") for name in names)
    if not isinstance(names, str) or names in ("", ALL) or len(module) > LONGEST_MODULE:
        return None
    if HARMLESS.fullmatch(names) is None or names.count("*") > 1:
        return None
    with instead(lambda cause: refusal(f"a pattern in {ADAPTER}", f"{names[:80]!r} ({cause})"), (re.error,)):
        return re.fullmatch(names, module) is not None


def _is_in_layers(module: str, settings: JsonMapping) -> bool:
    """Tell whether the first number in the name, behind a word of `layers_pattern`, is among the layers chosen."""
    chosen, behind = (settings.get(f"layers_{key}") for key in ("to_transform", "pattern"))
    if chosen is None or chosen == []:
        return True
    behind = behind if isinstance(behind, list) else [behind] if behind else []
    parts = module.split(".")
    numbers = [
        int(part)
        for place, part in enumerate(parts)
        if re.fullmatch("[0-9]{1,9}", part) and (parts[place - 1] in behind if behind else place > 1)
    ]
    return bool(numbers) and numbers[0] in (chosen if isinstance(chosen, list) else [chosen])


def _check_once(is_first: bool, stored: str) -> None:
    if not is_first:
        raise refusal("factors of each weight once in the adapter", f"{stored[:120]!r} besides others", "save it again")


def _find_replaced(base: Checkpoint, bare: str, settings: JsonMapping, others: Collection[str]) -> str:
    """The name of the base's tensor whose place this one takes: a trained bias, or part of a module saved whole."""
    plain = bare.replace(".modules_to_save.default", "").replace(".base_layer.", ".")
    name = _find(base, plain)
    saved = settings.get("modules_to_save") or ()
    is_new = isinstance(saved, list | tuple) and any(f".{module}." in f".{plain}" for module in (*saved, OUTPUT))
    if (name is None and not is_new) or (name or plain) in others:
        raise refusal("a tensor that takes the place of one in the base", f"{bare[:120]!r}", "merge it with peft first")
    return name or plain


def _pair(weight: Entry, adapter: Checkpoint, settings: JsonMapping, module: str, sides: dict[str, str]) -> FactorPair:
    down, up = adapter.entries[sides["A"]], adapter.entries[sides["B"]]
    can_multiply = len(up.shape) == len(down.shape) == 2 and up.shape[1] == down.shape[0] > 0
    straight = (up.shape[0], down.shape[1]) if can_multiply else None
    kinds = (tensor.dtype for tensor in (up, down, weight))
    if bad := next((kind for kind in kinds if not kind.is_floating_point or kind.itemsize < 2), None):
        raise refusal(f"factors and a weight of at least 16 bits for {module[:120]!r}", bad, "merge it with peft first")
    if straight is None or weight.shape not in (straight, straight[::-1]):
        got = f"{list(up.shape)} times {list(down.shape)}"
        raise refusal(f"factors whose product has shape {list(weight.shape)} for {module[:120]!r}", got)
    # A square weight fits both ways: only the settings tell. Embeddings are always kept as (in, out).
    wants_flip = _flag(settings, "fan_in_fan_out") or "lora_embedding_" in sides["A"]
    is_flipped = wants_flip if straight == straight[::-1] else weight.shape != straight
    return FactorPair(sides["A"], sides["B"], _scale(settings, module, rank=down.shape[0]), is_flipped)


def _check_orientation(entries: Mapping[str, Entry], pairs: Mapping[str, FactorPair]) -> None:
    """Hold what the settings say of square weights against what the shapes say of the others.

    `fan_in_fan_out` is one word for the whole adapter, and peft itself overrules it module by module.
    """
    linear = {name: pair for name, pair in pairs.items() if "lora_embedding_" not in pair.down}
    square = {name for name in linear if len(set(entries[name].shape)) == 1}
    shown = {pair.is_flipped for name, pair in linear.items() if name not in square}
    for name in square:
        if not shown <= {linear[name].is_flipped} or (linear[name].is_flipped and not shown):
            expected = f"fan_in_fan_out in {ADAPTER} that the other weights bear out, for the square `{name[:120]}`"
            raise refusal(expected, linear[name].is_flipped, "merge it with peft first, and open the result")


def _scale(settings: JsonMapping, module: str, *, rank: int) -> float:
    """alpha / r, or alpha / √r for rank-stabilised adapters; both may depend on the module."""
    stated = _by_module(settings, "rank_pattern", module, settings.get("r", rank))
    if stated != rank:
        raise refusal(f"factors of rank {stated!r:.40} for {module[:120]!r}, as {ADAPTER} says", f"rank {rank}")
    alpha = _by_module(settings, "alpha_pattern", module, settings.get("lora_alpha", 8))
    if type(alpha) not in (int, float) or not abs(alpha) < 1e30:
        raise refusal(f"a number as lora_alpha in {ADAPTER}", f"{alpha!r:.40}")
    return alpha / (math.sqrt(rank) if _flag(settings, "use_rslora") else rank)


def _by_module(settings: JsonMapping, key: str, module: str, default: Any) -> Any:
    """The value of the first pattern that fits the module."""
    patterns = settings.get(key) or {}
    if not isinstance(patterns, dict):
        raise refusal(f"a mapping as {key} in {ADAPTER}", f"{patterns!r:.60}")
    budget().check("patterns", len(patterns))
    for pattern, value in patterns.items():
        if not HARMLESS.fullmatch(pattern) or pattern.count("*") > 1 or len(module) > LONGEST_MODULE:
            raise refusal(f"simple patterns in {ADAPTER}", f"{pattern!r:.80}", "merge it with peft first")
        if _matches(pattern, module):
            return value
    return default


def _flag(settings: JsonMapping, key: str) -> bool:
    value = settings.get(key) or False
    if not isinstance(value, bool):
        raise refusal(f"true or false as {key} in {ADAPTER}", f"{value!r:.40}")
    return value


def _matches(pattern: str, module: str) -> bool:
    with instead(lambda cause: refusal(f"a pattern in {ADAPTER}", f"{pattern[:80]!r} ({cause})"), (re.error,)):
        return re.match(rf"(.*\.)?({pattern})$", module) is not None


def _find(base: Checkpoint, name: str) -> str | None:
    """The base's name: models are saved with or without the name of what holds their layers."""
    candidates = (name, name.partition(".")[2], f"model.{name}", f"transformer.{name}")
    return next((candidate for candidate in candidates if candidate in base.entries), None)
