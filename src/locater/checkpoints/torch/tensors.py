"""Tensors as torch pickles describe them: a storage by its key, and a strided view of it. Nothing is loaded."""

import math
import reprlib
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import refusal
from ..base import Entry
from .pickles import ordered_dict

DTYPES = tuple(value for value in vars(torch).values() if isinstance(value, torch.dtype))
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}


@dataclass(frozen=True)
class Storage:
    """A run of `count` numbers that other tensors may share."""

    key: str
    dtype: torch.dtype
    count: int

    @property
    def num_bytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class View:
    """A tensor: element (i, j, …) is number `offset + i stride_0 + j stride_1 + …` of its storage."""

    storage: Storage
    entry: Entry
    offset: int
    stride: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Numbers between the first and the last element, both counted."""
        if math.prod(self.entry.shape) == 0:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.entry.shape, self.stride, strict=True))

    @property
    def is_contiguous(self) -> bool:
        shape = self.entry.shape
        return self.extent == 0 or all(
            size == 1 or step == math.prod(shape[place + 1 :])
            for place, (size, step) in enumerate(zip(shape, self.stride, strict=True))
        )


def storage_from(pid: object) -> Storage:
    """Read `("storage", kind, key, device, count, …)`; a view of a storage (before torch 0.4) is refused."""
    match pid:
        case ("storage", torch.dtype() as dtype, str() | int() as key, _, int() as count, *rest) if count >= 0:
            if not any(rest):
                return Storage(str(key), dtype, count)
    raise refusal("a storage in the pickle", reprlib.repr(pid))


def rebuild(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any, dtype: torch.dtype | None = None) -> View:
    """`torch._utils._rebuild_tensor_v2`, without the numbers; fails on a view that leaves its storage or repeats it."""
    shape, steps = tuple(size), tuple(stride)
    numbers = (offset, *shape, *steps)
    if not isinstance(storage, Storage) or len(shape) != len(steps) or len(shape) > 32:
        raise refusal(
            "a storage with as many strides as dimensions", f"{reprlib.repr(shape)} and {reprlib.repr(steps)}"
        )
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise refusal("whole numbers as offset, shape and stride of a tensor", reprlib.repr(numbers))
    if any(isinstance(note, dict) and (note.get("conj") or note.get("neg")) for note in rest):
        raise refusal("a tensor stored as it is", "one that is to be conjugated or negated", "resolve it before saving")
    view = View(storage, Entry(shape, dtype or storage.dtype), offset, steps)
    # A tensor of more elements than its storage repeats them: a few bytes could then ask for any amount of memory.
    needed = max(math.prod(shape), offset + view.extent) * view.entry.dtype.itemsize
    if needed > storage.num_bytes:
        raise refusal(f"a tensor within its {storage.num_bytes} stored bytes", f"one that spans {needed}")
    return view


def rebuild_typed(storage: object, offset: object, size: object, stride: object, *rest: object) -> View:
    """`_rebuild_tensor_v3`: the dtype stands in the third place after the stride."""
    if len(rest) < 3 or not isinstance(rest[2], torch.dtype):
        raise refusal("a dtype for a tensor", reprlib.repr(rest))
    return rebuild(storage, offset, size, stride, *rest[3:], dtype=rest[2])


def unwrap_parameter(data: object, *_: object) -> Any:
    return data


def rebuild_subclass(function: Any, _kind: Any, arguments: Any, _state: Any) -> View:
    if function not in (rebuild, rebuild_typed, unwrap_parameter):
        raise refusal("a plain tensor", "a tensor of another class")
    return function(*arguments)


def _admit() -> dict[tuple[str, str], Any]:
    table: dict[tuple[str, str], Any] = {
        ("torch._utils", "_rebuild_tensor"): rebuild,
        ("torch._utils", "_rebuild_tensor_v2"): rebuild,
        ("torch._utils", "_rebuild_tensor_v3"): rebuild_typed,
        ("torch._utils", "_rebuild_parameter"): unwrap_parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): unwrap_parameter,
        ("torch._tensor", "_rebuild_from_type_v2"): rebuild_subclass,
        ("torch", "Tensor"): "Tensor",
        ("torch.nn.parameter", "Parameter"): "Parameter",
        ("torch", "Size"): lambda sizes=(): tuple(sizes),
        ("torch", "device"): lambda *_: "device",
        ("torch.serialization", "_get_layout"): lambda *_: "layout",
        ("torch.storage", "UntypedStorage"): torch.uint8,
        ("torch", "UntypedStorage"): torch.uint8,
        ("collections", "OrderedDict"): ordered_dict,
        ("collections", "defaultdict"): lambda *_: ordered_dict(),
        ("_codecs", "encode"): lambda text, _: text.encode("latin1"),
    }
    table |= {(module, "set"): lambda items=(): list(items) for module in ("builtins", "__builtin__")}
    table |= {(module, kind): kind for module in ("builtins", "__builtin__") for kind in ("int", "float", "dict")}
    table |= {(module, name): dtype for name, dtype in STORAGES.items() for module in ("torch", "torch.storage")}
    table |= {("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPES}
    return table


ADMITTED = _admit()
