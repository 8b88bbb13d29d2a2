"""Whole-number codes in groups along the inputs: GPTQ, AWQ, MLX and torchao."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import bad_value, missing
from ...records import JsonMapping
from ..base import Checkpoint, Rows
from .declared import FOUR_BITS, Declared
from .weight import (
    REMEDY,
    Grouped,
    QuantisedWeight,
    Shape,
    exponents,
    find_by,
    modules_with,
    parts_of,
    stated_count,
    unpack_bits,
    word,
)

# ---------------------------------------------------------------------------------------------------- GPTQ and AWQ
GPTQ_BITS, GPTQ_FORMATS = (2, 4, 8), ("gptq", "gptq_v2")
# Added to a word of the first format: one to each code in it, carries included, as the writer subtracted it.
ONES = {bits: sum(1 << place for place in range(0, 32, bits)) for bits in GPTQ_BITS}
# Where in a word of eight codes of AWQ the outputs 0, 1, …, 7 lie.
PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


@dataclass(frozen=True)
class InputFirst(Grouped):
    """Codes, scales and zero points stored input by input: reading some rows costs the whole packed tensor."""

    USUAL_SIZE: ClassVar = -1

    @property
    def block(self) -> Shape:
        size = self.settings.get("group_size", self.settings.get("q_group_size", self.USUAL_SIZE))
        return 1, self.shape[1] if size == -1 else stated_count({"group_size": size}, "group_size")

    def scale(self) -> Tensor:
        self.check_shape("scales", self.counts[::-1])
        return self.part("scales").T.float()


@dataclass(frozen=True)
class GPTQ(InputFirst):
    """W[o, i] = s[g(i), o]·(q[i, o] − z[g(i), o]), codes packed along the inputs; `g_idx` may shuffle the groups.

    The first format stores z − 1, word by word; the second (`gptq_v2`) stores z.
    """

    @property
    def bits(self) -> int:
        bits = stated_count(self.settings, "bits")
        if "g_idx" in self.parts:  # a module may have bits of its own; the number of inputs tells
            bits = 32 * self.part_size("qweight") // max(1, self.part_size("g_idx"))
        self.check(bits in GPTQ_BITS, "codes of 2, 4 or 8 bits", bits)
        return bits

    @property
    def shape(self) -> Shape:
        shape = self.matrix_shape("qweight")
        return shape[1], shape[0] * 32 // self.bits

    @property
    def counts(self) -> Shape:
        return self.shape[0], -(-self.shape[1] // self.block[1])  # the last group may be cut off

    def numbers(self, rows: Rows | None) -> Tensor:
        start, stop = rows or (0, self.shape[0])
        return unpack_bits(self.codes("qweight", torch.int32)[:, start:stop].T, self.bits).float()

    def zero(self) -> Tensor:
        self.check_shape("qzeros", (self.counts[1], self.shape[0] * self.bits // 32))
        words = self.codes("qzeros", torch.int32)
        kind = word(self.settings, "checkpoint_format") or word(self.settings, "format") or GPTQ_FORMATS[0]
        if kind not in GPTQ_FORMATS:
            raise bad_value(f"GPTQ weights in the format {' or '.join(GPTQ_FORMATS)}", repr(kind)[:60], REMEDY)
        if kind != "gptq_v2":
            words = (words.long() + ONES[self.bits]).to(torch.int32)  # wraps, as the writer's did
        zeros = unpack_bits(words, self.bits)
        if self.settings.get("sym") is True:  # then every zero point is the middle, which shows the format
            middle = bool((zeros == 2 ** (self.bits - 1)).all())
            self.check(middle, f"zero points in the middle, as `sym` says, in the format {kind}", "others")
        return zeros.T.float()

    def groups(self) -> Tensor | None:
        if "g_idx" in self.parts:
            return self.group_of_input("g_idx", self.counts[1])
        num_in, size = self.shape[1], self.block[1]
        self.check(num_in % size == 0, f"groups that divide {num_in} inputs", size)
        self.check(not self.settings.get("desc_act"), "`g_idx`, since `desc_act` is true")
        return None


@dataclass(frozen=True)
class AWQ(InputFirst):
    """The layout `gemm`: four-bit codes packed along the outputs, interleaved."""

    USUAL_SIZE = 128

    @property
    def shape(self) -> Shape:
        shape = self.matrix_shape("qweight")
        return shape[1] * 8, shape[0]

    def numbers(self, rows: Rows | None) -> Tensor:
        start, stop = rows or (0, self.shape[0])
        return self._codes("qweight")[:, start:stop].T.float()

    def zero(self) -> Tensor:
        self.check_shape("qzeros", (self.counts[1], self.shape[0] // 8))
        return self._codes("qzeros").T.float()

    def _codes(self, role: str) -> Tensor:
        return unpack_bits(self.codes(role, torch.int32), 4).unflatten(-1, (-1, 8))[..., PLACES].flatten(-2)


find_gptq = find_by(GPTQ, "qweight", "qzeros", "scales", "g_idx")


def find_awq(store: Checkpoint, settings: JsonMapping) -> Iterator[QuantisedWeight]:
    bits = settings.get("bits", settings.get("w_bit", 4))
    version = word(settings, "version", "gemm")
    if bits != 4 or version != "gemm":
        raise bad_value("AWQ weights of 4 bits in the layout `gemm`", f"{bits!r:.20} bits in `{version[:40]}`", REMEDY)
    return find_by(AWQ, "qweight", "qzeros", "scales")(store, settings)


# ------------------------------------------------------------------------------------------------------------- MLX
MLX_BITS = (2, 3, 4, 5, 6, 8)
# Bits and group of the kinds that fix them.
FIXED = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}


@dataclass(frozen=True)
class MLX(Grouped):
    """W = s·q + b; micro-scaled kinds have exponents for scales. `settings` are the module's: it may have its own."""

    @property
    def mode(self) -> str:
        mode = word(self.settings, "mode", "affine")
        self.check(mode == "affine" or mode in FIXED, f"the mode affine, {', '.join(FIXED)}", repr(mode[:40]))
        return mode

    @property
    def bits(self) -> int:
        bits = stated_count(self.settings, "bits", FIXED.get(self.mode, (None,))[0])
        self.check(bits == FIXED[self.mode][0] if self.mode in FIXED else bits in MLX_BITS, "a number of bits", bits)
        return bits

    @property
    def shape(self) -> Shape:
        shape = self.matrix_shape("weight")
        return shape[0], shape[1] * 32 // self.bits

    @property
    def block(self) -> Shape:
        size = stated_count(self.settings, "group_size", FIXED.get(self.mode, (0, None))[1])
        self.check(self.mode == "affine" or size == FIXED[self.mode][1], "the group of its kind", size)
        return 1, size

    def numbers(self, rows: Rows | None) -> Tensor:
        codes = unpack_bits(self.part("weight", rows), self.bits)
        if self.mode == "affine":
            return codes.float()
        return codes.contiguous().view(torch.float8_e4m3fn).float() if self.mode == "mxfp8" else FOUR_BITS[codes.long()]

    def scale(self) -> Tensor:
        scales = self.by_block("scales")
        is_byte = scales.dtype == torch.uint8
        self.check(is_byte == (self.mode in FIXED), f"scales of the mode {self.mode}", scales.dtype)
        return scales.view(torch.float8_e4m3fn).float() if self.mode == "nvfp4" else exponents(scales)

    def bias(self) -> Tensor | None:
        self.check(self.mode == "affine" or "biases" not in self.parts, "no biases", "some")
        return self.by_block("biases").float() if self.mode == "affine" else None


def find_mlx(store: Checkpoint, settings: JsonMapping) -> Iterator[QuantisedWeight]:
    for module in modules_with(store, "weight", (torch.uint32,)):
        if f"{module}.scales" in store.entries:
            own = settings.get(module)
            parts = parts_of(store, module, ("weight", "scales", "biases"))
            yield MLX(store, f"{module}.weight", parts, {**settings, **own} if isinstance(own, Mapping) else settings)


# --------------------------------------------------------------------------------------------------------- torchao
TORCHAO_PARTS = ("_weight_qdata", "_weight_scale", "_weight_zero_point", "_weight_act_pre_scale")
TORCHAO_KINDS = ("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")


@dataclass(frozen=True)
class TorchAO(Declared):
    """Tensors flattened into a safetensors file, whose header says each weight's kind and block."""

    NUMBERS = "_weight_qdata"
    SCALE = "_weight_scale"

    @property
    def block(self) -> Shape:
        block = self.settings.get("block_size")
        fits = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
        self.check(fits, "the two sizes of its blocks", f"{block!r:.60}")
        return tuple(block or ())

    def numbers(self, rows: Rows | None) -> Tensor:
        self.check("_weight_act_pre_scale" not in self.parts, "no scale of the activations", "one")
        for role in self.settings["parts"]:
            self.check(f"_weight_{role}" in self.parts, f"`_weight_{role}`, as the header says")
        return super().numbers(rows)

    def zero(self) -> Tensor | None:
        return self.by_block("_weight_zero_point").float() if "_weight_zero_point" in self.parts else None


def find_torchao(store: Checkpoint, settings: JsonMapping) -> Iterator[QuantisedWeight]:
    for module in modules_with(store, "_weight_qdata"):
        kind, data = _description(store, f"{module}.weight")
        if kind not in TORCHAO_KINDS:
            known = f"a torchao tensor among {', '.join(TORCHAO_KINDS)} as `{module[:120]}.weight`"
            raise bad_value(known, kind[:60], REMEDY)
        yield TorchAO(store, f"{module}.weight", parts_of(store, module, TORCHAO_PARTS), data)


def _description(store: Checkpoint, name: str) -> tuple[str, JsonMapping]:
    try:
        found = json.loads(store.metadata.get(name, "null"))
    except (ValueError, RecursionError):
        found = None
    entries = found if isinstance(found, dict) else {}
    kind, data, parts = (entries.get(key) for key in ("_type", "_data", "_tensor_data_names"))
    if not isinstance(kind, str) or not isinstance(data, dict) or not isinstance(parts, list):
        raise missing(f"the kind of `{name[:120]}` in the header of its file", "fetch it again")
    return kind, data | {"parts": parts}
