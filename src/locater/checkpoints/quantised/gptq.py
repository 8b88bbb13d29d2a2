"""GPTQ: codes packed along the inputs, in groups that `g_idx` may shuffle. W[o, i] = s[g(i), o]·(q[i, o] − z[g(i), o]).

The first format stores z − 1, word by word; the second (`gptq_v2`) stores z.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import refusal
from ...records import JsonMapping
from ..base import Checkpoint, Rows
from .weight import REMEDY, Shape, Weight, modules_with, number, parts_of, unpack_bits, word

PARTS = ("qweight", "qzeros", "scales", "g_idx")
BITS = (2, 4, 8)
FORMATS = ("gptq", "gptq_v2")
# Added to a word of the first format: one to each code in it, carries included, as the writer subtracted it.
ONES = {bits: sum(1 << place for place in range(0, 32, bits)) for bits in BITS}


@dataclass(frozen=True)
class GPTQ(Weight):
    """Reading some rows costs the whole packed tensor, since a word holds inputs."""

    @property
    def bits(self) -> int:
        bits = number(self.settings, "bits")
        words = self.part_size("qweight")
        if "g_idx" in self.parts:  # a module may have bits of its own; the number of inputs tells
            bits = 32 * words // max(1, self.part_size("g_idx"))
        self.check(bits in BITS, "codes of 2, 4 or 8 bits", bits)
        return bits

    @property
    def shape(self) -> Shape:
        shape = self.part_shape("qweight")
        self.check(len(shape) == 2, "a packed matrix", f"shape {[*shape]}")
        return shape[1], shape[0] * 32 // self.bits

    def read(self, rows: Rows | None) -> Tensor:
        num_out, num_in = self.shape
        start, stop = rows or (0, num_out)
        groups = self._groups(num_in)
        zeros = unpack_bits(self._zero_words(), self.bits)[:, start:stop]
        codes = unpack_bits(self.part("qweight")[:, start:stop].T, self.bits)
        scales = self.part("scales")[:, start:stop].float()
        return ((codes.int() - zeros[groups].T.int()) * scales[groups].T).contiguous()

    def _groups(self, num_in: int) -> Tensor:
        """The group of each input."""
        num_out, num_groups = self.shape[0], self.part_size("scales")
        self.check_shape("scales", (num_groups, num_out))
        self.check_shape("qzeros", (num_groups, num_out * self.bits // 32))
        size = self.settings.get("group_size", -1)
        size = num_in if size == -1 else number(self.settings, "group_size")
        self.check(num_groups == -(-num_in // size), f"scales for groups of {size} inputs", f"{num_groups} groups")
        if "g_idx" not in self.parts:
            self.check(num_in % size == 0, f"groups that divide {num_in} inputs", size)
            self.check(not self.settings.get("desc_act"), "`g_idx`, since `desc_act` is true")
            return torch.arange(num_in) // size
        self.check_shape("g_idx", (num_in,))
        groups = self.codes("g_idx").long()
        inside = bool(((groups >= 0) & (groups < num_groups)).all())
        self.check(inside, f"groups below {num_groups} in `g_idx`", "one outside")
        return groups

    def _zero_words(self) -> Tensor:
        words = self.codes("qzeros", torch.int32)
        kind = word(self.settings, "checkpoint_format") or word(self.settings, "format") or FORMATS[0]
        if kind not in FORMATS:
            raise refusal(f"GPTQ weights in the format {' or '.join(FORMATS)}", repr(kind)[:60], REMEDY)
        if kind != "gptq_v2":
            words = (words.long() + ONES[self.bits]).to(torch.int32)  # wraps, as the writer's did
        if self.settings.get("sym") is True:  # then every zero point is the middle, which shows the format
            middle = bool((unpack_bits(words, self.bits) == 2 ** (self.bits - 1)).all())
            self.check(middle, f"zero points in the middle, as `sym` says, in the format {kind}", "others")
        return words


def find(store: Checkpoint, settings: JsonMapping) -> Iterator[Weight]:
    for module in modules_with(store, "qweight"):
        parts = parts_of(store, module, PARTS)
        if store.entries[parts["qweight"]].dtype != torch.int32 or len(store.entries[parts["qweight"]].shape) != 2:
            raise refusal(f"words of 32 bits in `{parts['qweight'][:120]}`", "another type", REMEDY)
        yield GPTQ(store, f"{module}.weight", parts, settings)
