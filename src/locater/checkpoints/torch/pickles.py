"""Untrusted pickles: only listed names are admitted, and those stand for plain records. Nothing is executed.

Tensors are what torch's pickles describe: a storage by its key, and a strided view of it. Nothing is loaded.

The interpreter in Python is used on purpose: the one in C reserves memory for any memo number that a pickle names.
"""

import math
import pickle
import reprlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any

import torch

from ...budget import budget
from ...errors import Refusal, instead, refusal, shown
from ..base import Entry, are_counts

Admitted = Mapping[tuple[str, str], Any]

# Opcodes that set aside memory on the pickle's word, reach for code registered elsewhere, or hash what they are given.
BARRED = (
    pickle.BYTEARRAY8,
    pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER,
    pickle.EXT1,
    pickle.EXT2,
    pickle.EXT4,
    pickle.INST,
    pickle.OBJ,
    pickle.EMPTY_SET,
    pickle.FROZENSET,
)


class CodeRefusal(Refusal):
    """The pickle asks for something to be imported that is not on the list."""


class Record:
    """Stands for an object of a class that is not imported; its state is data."""

    state: Any = None

    def __init__(self, *_: object) -> None:
        pass

    def get(self, key: str, default: object = None) -> Any:
        return self.state.get(key, default) if isinstance(self.state, dict) else default


def check_key(key: object) -> Any:
    """The key of a dict, if it is plain: tuples that share their parts take for ever to hash, large numbers collide."""
    parts = key if isinstance(key, tuple) else (key,)
    if len(parts) > 100 or any(isinstance(part, tuple | float | complex | bytes) for part in parts):
        raise pickle.UnpicklingError("a key that is neither a word nor a whole number")
    if any(isinstance(part, int) and abs(part) >= 2**60 for part in parts):
        raise pickle.UnpicklingError("a number beyond 60 bits as a key")
    return key


def ordered_dict(items: Any = ()) -> OrderedDict[Any, Any]:
    """Build a reduced `OrderedDict`."""
    return OrderedDict((check_key(key), value) for key, value in items)


class _Counted:
    """File under an interpreter, which asks it for a byte at each opcode: up to a limit."""

    def __init__(self, file: BufferedIOBase) -> None:
        self.file, self.left = file, budget().opcodes
        self.readline, self.readinto = file.readline, file.readinto

    def read(self, size: int = -1) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise refusal(f"at most {budget().opcodes} opcodes in a pickle", "more", "it holds more than weights")
        return self.file.read(size)


class Unpickler(pickle._Unpickler):
    """Reads one pickle, admitting only `(module, name)` pairs of the table."""

    # Set by the interpreter; its type stubs leave them out.
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    dispatch: Any = {code: load for code, load in pickle._Unpickler.dispatch.items() if bytes([code]) not in BARRED}

    def __init__(self, file: BufferedIOBase, admitted: Admitted, storages: dict[str, "Storage"] | None) -> None:
        super().__init__(_Counted(file), encoding="utf-8")
        self.admitted, self.storages = admitted, storages

    def find_class(self, module: str, name: str) -> Any:  # type: ignore[override]
        key = (module, name)
        if key not in self.admitted:
            asked = f"{module}.{name}"[:120]
            raise CodeRefusal(str(refusal("a pickle of plain tensors", f"one that asks for the code {asked!r}")))
        return self.admitted[key]

    def persistent_load(self, pid: object) -> Any:
        if self.storages is None:
            raise pickle.UnpicklingError("a reference to something outside the pickle")
        storage = storage_from(pid)
        if self.storages.setdefault(storage.key, storage) != storage:
            raise refusal(f"one meaning of storage {storage.key[:40]!r}", "two")
        return storage

    def load_build(self) -> None:
        """Give state to records only; the state of other objects (notes of a state dict) is dropped."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], Record):
            self.stack[-1].state = state
        elif not isinstance(self.stack[-1], OrderedDict):
            raise pickle.UnpicklingError("state for an object that takes none")

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][check_key(key)] = value

    def load_setitems(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][check_key(key)] = value

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({check_key(key): value for key, value in zip(items[::2], items[1::2], strict=True)})

    dispatch |= {
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.DICT[0]: load_dict,
    }


def load_pickle(
    file: BufferedIOBase, *, name: str, admitted: Admitted | None = None, storages: dict[str, "Storage"] | None = None
) -> Any:
    """The object in a pickle, built from data alone; fails on damage and on names outside the table (`ADMITTED`).

    The storages that its tensors are views of are put into `storages`; without it there may be none.
    """
    with instead(lambda cause: damaged(f"a readable pickle in {name}", cause)):
        return Unpickler(file, ADMITTED if admitted is None else admitted, storages).load()


def damaged(expected: str, cause: Exception) -> Refusal:
    """The refusal of a file that made a reader fail, in whatever way."""
    return refusal(expected, f"a damaged one ({shown(f'{type(cause).__name__}: {cause}', 120)})", "fetch it again")


# ---------------------------------------------------------------------------------------------------- tensors
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
class Strided:
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


def rebuild(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any, dtype: torch.dtype | None = None) -> Strided:
    """`torch._utils._rebuild_tensor_v2`, without the numbers; fails on a view that leaves its storage or repeats it."""
    shape, steps = tuple(size), tuple(stride)
    if not isinstance(storage, Storage) or len(shape) != len(steps):
        raise refusal(
            "a storage with as many strides as dimensions", f"{reprlib.repr(shape)} and {reprlib.repr(steps)}"
        )
    if not all(map(are_counts, ([offset], shape, steps))):
        raise refusal("whole numbers as offset, shape and stride of a tensor", reprlib.repr((offset, shape, steps)))
    if any(isinstance(note, dict) and (note.get("conj") or note.get("neg")) for note in rest):
        raise refusal("a tensor stored as it is", "one that is to be conjugated or negated", "resolve it before saving")
    view = Strided(storage, Entry(shape, dtype or storage.dtype), offset, steps)
    # A tensor of more elements than its storage repeats them: a few bytes could then ask for any amount of memory.
    needed = max(math.prod(shape), offset + view.extent) * view.entry.dtype.itemsize
    if needed > storage.num_bytes:
        raise refusal(f"a tensor within its {storage.num_bytes} stored bytes", f"one that spans {needed}")
    return view


def rebuild_typed(storage: object, offset: object, size: object, stride: object, *rest: object) -> Strided:
    """`_rebuild_tensor_v3`: the dtype stands in the third place after the stride."""
    if len(rest) < 3 or not isinstance(rest[2], torch.dtype):
        raise refusal("a dtype for a tensor", reprlib.repr(rest))
    return rebuild(storage, offset, size, stride, *rest[3:], dtype=rest[2])


def unwrap_parameter(data: object, *_: object) -> Any:
    return data


def rebuild_subclass(function: Any, _kind: Any, arguments: Any, _state: Any) -> Strided:
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
