"""Untrusted pickles: only listed names are admitted, and those stand for plain records. Nothing is executed.

The interpreter in Python is used on purpose: the one in C reserves memory for any memo number that a pickle names.
"""

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from io import BufferedIOBase
from typing import Any

from ...budget import budget
from ...errors import Refusal, refusal, shown

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

    def __init__(
        self, file: BufferedIOBase, *, admitted: Admitted, persistent: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(_Counted(file), encoding="utf-8")
        self.admitted = admitted
        self.persistent = persistent

    def find_class(self, module: str, name: str) -> Any:  # type: ignore[override]
        key = (module, name)
        if key not in self.admitted:
            asked = f"{module}.{name}"[:120]
            raise CodeRefusal(str(refusal("a pickle of plain tensors", f"one that asks for the code {asked!r}")))
        return self.admitted[key]

    def persistent_load(self, pid: object) -> Any:
        if self.persistent is None:
            raise pickle.UnpicklingError("a reference to something outside the pickle")
        return self.persistent(pid)

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
    file: BufferedIOBase, *, name: str, admitted: Admitted, persistent: Callable[[Any], Any] | None = None
) -> Any:
    """The object in a pickle, built from data alone; fails on any name outside the table and on damage."""
    try:
        return Unpickler(file, admitted=admitted, persistent=persistent).load()
    except Refusal:
        raise
    except Exception as cause:  # noqa: BLE001  (a damaged pickle can fail in any way)
        reason = shown(f"{type(cause).__name__}: {cause}", 120)
        raise refusal(f"a readable pickle in {name}", f"a damaged one ({reason})", "fetch it again") from None
