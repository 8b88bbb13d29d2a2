"""AWQ (its `gemm` layout): four-bit codes packed along the outputs, interleaved. W[o, i] = s·(q − z) by group."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import refusal
from ...records import JsonMapping
from ..base import Checkpoint, Rows
from .weight import REMEDY, Shape, Weight, grid, modules_with, number, parts_of, unpack_bits, word

PARTS = ("qweight", "qzeros", "scales")
# Where in a word of eight codes the outputs 0, 1, …, 7 lie.
PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


@dataclass(frozen=True)
class AWQ(Weight):
    """Reading some rows costs the whole packed tensor, which lies input by input."""

    @property
    def shape(self) -> Shape:
        shape = self.part_shape("qweight")
        self.check(len(shape) == 2, "a packed matrix", f"shape {[*shape]}")
        return shape[1] * 8, shape[0]

    def read(self, rows: Rows | None) -> Tensor:
        num_out, num_in = self.shape
        start, stop = rows or (0, num_out)
        size = self.settings.get("group_size", self.settings.get("q_group_size", 128))
        size = num_in if size == -1 else number({"group_size": size}, "group_size")
        num_groups = grid(self.shape, (1, size))[1]
        self.check_shape("scales", (num_groups, num_out))
        self.check_shape("qzeros", (num_groups, num_out // 8))
        groups = torch.arange(num_in) // size
        codes, zeros = (_unpack(self.codes(role, torch.int32))[:, start:stop] for role in ("qweight", "qzeros"))
        scales = self.part("scales")[:, start:stop].float()
        return ((codes.int() - zeros[groups].int()) * scales[groups]).T.contiguous()


def find(store: Checkpoint, settings: JsonMapping) -> Iterator[Weight]:
    bits = settings.get("bits", settings.get("w_bit", 4))
    version = word(settings, "version", "gemm")
    if bits != 4 or version != "gemm":
        raise refusal("AWQ weights of 4 bits in the layout `gemm`", f"{bits!r:.20} bits in `{version[:40]}`", REMEDY)
    for module in modules_with(store, "qweight"):
        parts = parts_of(store, module, PARTS)
        if store.entries[parts["qweight"]].dtype != torch.int32:
            raise refusal(f"words of 32 bits in `{parts['qweight'][:120]}`", "another type", REMEDY)
        yield AWQ(store, f"{module}.weight", parts, settings)


def _unpack(words: Tensor) -> Tensor:
    return unpack_bits(words, 4).unflatten(-1, (-1, 8))[..., PLACES].flatten(-2)
