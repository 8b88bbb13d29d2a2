"""torchao, as its tensors are flattened into safetensors files: `_weight_qdata`, `_weight_scale`, `_weight_zero_point`.

The header of the file says each weight's kind and block. W = s·(q − z), for the kinds that keep a number per byte.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import missing, refusal
from ...records import JsonMapping
from ..base import Checkpoint, Rows
from .floating import EIGHT_BITS
from .weight import REMEDY, Shape, Weight, grid, modules_with, parts_of, spread_over

PARTS = ("_weight_qdata", "_weight_scale", "_weight_zero_point", "_weight_act_pre_scale")
KEYS = ("_type", "_data", "_tensor_data_names")
KINDS = ("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")


@dataclass(frozen=True)
class TorchAO(Weight):
    @property
    def shape(self) -> Shape:
        return self.part_shape("_weight_qdata")

    def read(self, rows: Rows | None) -> Tensor:
        shape, block = self.shape, self.settings.get("block_size")
        is_pair = isinstance(block, list) and len(block) == len(shape) == 2
        self.check(
            is_pair and all(type(n) is int and n > 0 for n in block or ()),
            "a matrix and the size of its blocks",
            f"shape {[*shape]} and {block!r:.60}",
        )
        assert isinstance(block, list)
        self.check("_weight_act_pre_scale" not in self.parts, "no scale of the activations", "one")
        for role in self.settings["parts"]:
            self.check(f"_weight_{role}" in self.parts, f"`_weight_{role}`, as the header says")
        counts = grid(shape, tuple(block))
        numbers = self.codes("_weight_qdata", torch.int8, *EIGHT_BITS, rows=rows).float()
        if "_weight_zero_point" in self.parts:
            numbers = numbers - self._spread("_weight_zero_point", counts, tuple(block), rows)
        return numbers * self._spread("_weight_scale", counts, tuple(block), rows)

    def _spread(self, role: str, counts: Shape, block: Shape, rows: Rows | None) -> Tensor:
        spellings = [counts, *([(counts[0],)] if counts[1] == 1 else []), *([()] if counts == (1, 1) else [])]
        self.check_shape(role, *spellings)
        return spread_over(self.part(role).float().reshape(counts), self.shape, block, rows)


def find(store: Checkpoint, settings: JsonMapping) -> Iterator[Weight]:
    for module in modules_with(store, "_weight_qdata"):
        kind, data = _description(store, f"{module}.weight")
        if kind not in KINDS:
            raise refusal(f"a torchao tensor among {', '.join(KINDS)} as `{module[:120]}.weight`", kind[:60], REMEDY)
        yield TorchAO(store, f"{module}.weight", parts_of(store, module, PARTS), data)


def _description(store: Checkpoint, name: str) -> tuple[str, JsonMapping]:
    try:
        found = json.loads(store.metadata.get(name, "null"))
    except (ValueError, RecursionError):
        found = None
    kind, data, parts = (found.get(key) for key in KEYS) if isinstance(found, dict) else (None, None, None)
    if not isinstance(kind, str) or not isinstance(data, dict) or not isinstance(parts, list):
        raise missing(f"the kind of `{name[:120]}` in the header of its file", "fetch it again")
    return kind, data | {"parts": parts}
