"""GGUF files, read by tensor and by row, under the names and in the layout of the model's own code."""

import math
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, NamedTuple

import numpy
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ...errors import import_extra, missing, refusal
from ...records import Json
from ..base import Checkpoint, Entry, Rows, read_tensor
from ..bytes import ByteSource, Folder, check_range
from ..sharded import PART, complete_parts
from .config import SAFETENSORS, translate_settings
from .header import Header, TensorInfo, read_header
from .translate import Translated, translate

# Kinds that torch has a type for; everything else is unpacked into float32.
PLAIN = {
    0: torch.float32,
    1: torch.float16,
    24: torch.int8,
    25: torch.int16,
    26: torch.int32,
    27: torch.int64,
    28: torch.float64,
    30: torch.bfloat16,
}
# Rotary settings of Llama 3; only the factor differs between its releases.
LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192


class _Place(NamedTuple):
    """A stored tensor, the file it lies in and how many bytes it has there."""

    source: ByteSource
    stored: TensorInfo
    num_bytes: int


class GGUFFile(Checkpoint):
    """One GGUF file, or the parts of one that was split.

    Reading rows costs those rows, or whole heads where the converter moved rows, or the whole tensor where it fused.
    """

    format = "gguf"

    def __init__(self, sources: list[ByteSource], *, config: Json) -> None:
        headers = [read_header(source) for source in sources]
        self.places = _places(sources, headers)
        shapes = {name: place.stored.shape for name, place in self.places.items()}
        settings = headers[0].settings
        own = translate_settings(settings, self.places)
        self.translated = translate(settings, shapes)
        entries = {name: self._entry(item) for name, item in self.translated.items()}
        # What lies beside the file may know more, but only if it contradicts nothing of what the file says itself.
        beside = config if all(key not in config or config[key] == own[key] for key in own if _tells(own[key])) else {}
        beside = beside if config.get("model_type") == own["model_type"] else {}
        super().__init__(entries, config={**beside, **own}, place=sources[0].name, parts=sources)
        add_factors(self.config, self.entries, self.read)
        self.entries = {name: entry for name, entry in entries.items() if name not in FACTORS}  # read into the config

    def _entry(self, item: Translated) -> Entry:
        kinds = [PLAIN.get(self.places[name].stored.kind, torch.float32) for name in item.sources]
        return Entry(item.shape, kinds[0] if len(set(kinds)) == 1 else torch.float32)

    def fetch(self, name: str, rows: Rows | None) -> Shaped[Tensor, "..."]:
        shape, sources, change = self.translated[name]
        group, kind = change.group(shape), self.entries[name].dtype
        if rows is None or group is None:
            whole = change.apply([self._unpack(source, None) for source in sources], group).to(kind)
            return whole if rows is None else whole[rows[0] : rows[1]].clone()
        start, stop = rows[0] // group * group, -(-rows[1] // group) * group
        part = change.apply([self._unpack(sources[0], (start, stop))], group).to(kind)
        return part[rows[0] - start : rows[1] - start].contiguous()

    def _unpack(self, name: str, rows: Rows | None) -> Tensor:
        source, (shape, kind, start), num_bytes = self.places[name]
        if rows is not None and len(shape) == 1 and kind not in PLAIN:  # elements of a packed vector
            return self._unpack(name, None)[rows[0] : rows[1]].clone()
        if rows is not None:
            each, count = num_bytes // max(1, shape[0]), rows[1] - rows[0]
            start, num_bytes, shape = start + rows[0] * each, count * each, (count, *shape[1:])
        if kind in PLAIN:
            return read_tensor(source, start, PLAIN[kind], shape)
        if math.prod(shape) == 0:
            return torch.empty(shape)
        gguf, packed = _gguf(), numpy.frombuffer(source.read(start, num_bytes), numpy.uint8).reshape(*shape[:-1], -1)
        # Blocks of random bytes may hold infinities; they are the file's, not an error of ours.
        with numpy.errstate(all="ignore"):
            return torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType(kind)))


def open_gguf(folder: Folder, files: list[str], *, config: Json) -> GGUFFile:
    """A file, or all parts of a split one; naming the first part is enough."""
    part = PART.match(files[0])
    if len(files) == 1 and part is not None:
        count = int(part["count"])
        files = [f"{part['stem']}-{number:05d}-of-{part['count']}.gguf" for number in range(1, min(count, 999) + 1)]
        files = complete_parts(files[0], [file for file in files if folder.find(file) is not None] or files[:1])
    sources = [source for file in files if (source := folder.find(file)) is not None]
    return GGUFFile(sources, config=config)


def _tells(value: object) -> bool:
    """Tell whether a setting distinguishes models: integers and words are written alike by all, fractions rounded."""
    return isinstance(value, int | str) and not isinstance(value, bool)


def _places(sources: list[ByteSource], headers: list[Header]) -> dict[str, _Place]:
    places: dict[str, _Place] = {}
    for source, header in zip(sources, headers, strict=True):
        end = 0
        for name, stored in sorted(header.tensors.items(), key=lambda item: item[1].start):
            length = math.prod(stored.shape[:-1]) * _row_bytes(name, stored)
            check_range(source, stored.start, length)
            if stored.start < end or name in places:
                raise refusal(f"tensors one after another in {source.name}", f"an overlap at {name[:80]!r}")
            places[name], end = _Place(source, stored, length), stored.start + length
    if not places:
        raise missing(f"tensors in {sources[0].name}", "name a file that holds weights")
    return {name: places[name] for header in headers for name in header.tensors}


def _row_bytes(name: str, stored: TensorInfo) -> int:
    width = stored.shape[-1] if stored.shape else 1
    if stored.kind in PLAIN:
        return width * PLAIN[stored.kind].itemsize
    known = _packed_sizes()
    if stored.kind not in known:
        remedy = "a newer release of the package gguf may know it"
        raise refusal(f"a known kind of numbers for {name[:80]!r}", f"kind {stored.kind}", remedy)
    block, size = known[stored.kind]
    if width % block:
        raise refusal(f"rows of whole blocks of {block} for {name[:80]!r}", f"rows of {width}", "fetch it again")
    return width // block * size


@cache
def _packed_sizes() -> dict[int, tuple[int, int]]:
    """Numbers and bytes of one block, for each kind that can be unpacked."""
    gguf = _gguf()
    return {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items() if hasattr(gguf.quants, kind.name)}


def _gguf() -> Any:
    return import_extra("gguf", "the package gguf, to unpack quantised weights", extra="gguf")


LONGROPE = {"rope_factors_long.weight", "rope_factors_short.weight"}
FACTORS = LONGROPE | {"rope_freqs.weight"}


def add_factors(config: Json, names: Collection[str], read: Callable[[str], Tensor]) -> None:
    """Put `rope_scaling` into the configuration where the file holds factors and the settings said nothing."""
    stored = FACTORS & set(names)
    if stored and ("rope_scaling" in config or stored not in ({"rope_freqs.weight"}, LONGROPE)):
        raise refusal("positions stretched in one way", f"others, with {', '.join(sorted(stored))}", SAFETENSORS)
    if "rope_scaling" in config:
        return
    full = (config.get("rope_parameters") or {}).get("full_attention", {})
    if full.get("rope_type") == "proportional":
        full["partial_rotary_factor"] = share_that_turns(
            read("rope_freqs.weight") if "rope_freqs.weight" in names else None
        )
        return
    if "rope_freqs.weight" in names:
        factors = read("rope_freqs.weight").float()
        scaling = llama3_settings(factors, theta=config.get("rope_theta", 10_000.0))
        if scaling is None and bool((factors != 1).any()):
            raise refusal("Llama 3's factors in rope_freqs.weight", "others", SAFETENSORS)
        config |= {"rope_scaling": scaling} if scaling else {}
    if "rope_factors_long.weight" in stored:
        long, short = (read(f"rope_factors_{kind}.weight").float().flatten().tolist() for kind in ("long", "short"))
        config["rope_scaling"] = {"rope_type": "longrope", "long_factor": long, "short_factor": short}


def share_that_turns(factors: Float[Tensor, "..."] | None) -> float:
    """Gemma 4's full layers: frequencies of the first pairs as they are, those of the rest divided by 1e30."""
    turns = torch.zeros(0, dtype=torch.bool) if factors is None else factors.flatten() == 1
    number = int(turns.sum())
    if factors is None or not number or not turns[:number].all() or bool((factors.flatten()[number:] < 1e29).any()):
        remedy = "scan the model's safetensors, which say which pairs turn"
        raise refusal("rope_freqs.weight of ones, then of 1e30", "others" if number else "no ones", remedy)
    return number / len(turns)


def llama3_settings(factors: Float[Tensor, "..."], *, theta: object) -> Json | None:
    """The settings whose factors these are; none if Llama 3's rule does not give them."""
    largest = factors.max().item() if factors.numel() else 0.0
    if factors.ndim != 1 or not isinstance(theta, float | int) or not theta > 0 or not 1 < largest < math.inf:
        return None
    if not torch.allclose(llama3_factors(len(factors), theta=float(theta), factor=largest), factors, rtol=1e-3):
        return None
    return {
        "rope_type": "llama3",
        "factor": largest,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": ORIGINAL,
    }


def llama3_factors(pairs: int, *, theta: float, factor: float) -> Float[Tensor, " pairs"]:
    """Divisors of the frequencies: 1 for short waves, `factor` for long ones, and a smooth passage between."""
    waves = 2 * math.pi * theta ** (torch.arange(pairs) / pairs)
    smooth = ((ORIGINAL / waves - LOW) / (HIGH - LOW)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
