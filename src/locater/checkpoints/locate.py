"""From what a user names (a directory, a file, a hub id, an address) to a folder and the file in it to open."""

import os
import re
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from ..errors import failed, missing, refusal
from ..packaged import packaged
from .bytes import Folder, LocalFolder

SAFETENSORS = (".safetensors",)
TORCH = (".bin", ".pt", ".pth", ".ckpt")
GGUF = (".gguf",)
WEIGHTS = SAFETENSORS + TORCH + GGUF
INDEX = ".index.json"
METADATA = ".metadata"
# Weights of other frameworks, which nothing here reads.
FOREIGN = {
    ".msgpack": "Flax",
    "_CHECKPOINT_METADATA": "Orbax",
    ".keras": "Keras",
    ".h5": "Keras",
    ".tf_checkpoint": "TensorFlow",
}

# Tried by name where a place cannot list its files.
USUAL = ("model.safetensors" + INDEX, "model.safetensors", "pytorch_model.bin" + INDEX, "pytorch_model.bin", METADATA)
# What trainers leave beside the weights.
OTHER = re.compile(r"^(training_args|optimizer|scheduler|scaler|rng_state.*|random_states.*|adapter_model)\.")
PART = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.\w+)$")


def locate(source: str | os.PathLike[str]) -> tuple[Folder, str | None]:
    """The folder, and the file in it if the source names one. What lies on disk wins over a hub id."""
    text = os.fspath(packaged(source))
    if "://" in text:
        from .remote import locate_address

        return locate_address(text)
    path = Path(text).expanduser()
    try:
        if path.is_dir():
            return LocalFolder(path), None
        if path.is_file():
            return LocalFolder(path.parent), path.name
        exists = path.exists()
    except (OSError, ValueError) as cause:  # a name too long, or with a null byte
        raise refusal("a path or a hub id", f"{text!r:.120} ({cause})") from None
    if exists:
        raise refusal("a file or a directory", f"{text}, which is neither")
    if not is_hub_id(text):
        raise failed("open it", "no such file or folder", _meant(path))
    from .remote import locate_hub

    return locate_hub(text), None


def _meant(path: Path) -> str:
    """Suggest a similar name in the folder where the path was looked for."""
    parts = list(path.parts)
    for at in range(len(parts)):
        before, name = Path(*parts[:at]), parts[at]
        if not (before / name).exists():
            with suppress(OSError):
                if near := get_close_matches(name, [one.name for one in before.iterdir()], n=1):
                    return f"did you mean {before / near[0]}?"
            break
    return "check the spelling"


def is_hub_id(text: str) -> bool:
    """Tell an id, `name` or `owner/name` and perhaps `@revision`, from what was meant as a path."""
    name = text.partition("@")[0]
    is_one = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None
    return is_one and not name.endswith((*WEIGHTS, INDEX, ".json"))


def choose(folder: Folder) -> list[str]:
    """The files to open together: safetensors before a distributed checkpoint before pickles before GGUF.

    What frameworks leave beside a distributed checkpoint (`common.pt`) is no model.
    """
    files = folder.files()
    if not files:
        found = [name for name in USUAL if folder.find(name) is not None][:1]
    else:
        distributed = [METADATA] * (METADATA in files)
        groups = (
            distributed if kind is None else _choose_kind(files, kind) for kind in (SAFETENSORS, None, TORCH, GGUF)
        )
        found = next((group for group in groups if group), [])
    if not found:
        _check_foreign(folder, files)
        what = f"weights in {folder.place} ({', '.join('*' + suffix for suffix in WEIGHTS)} or {METADATA})"
        raise missing(what, _inside(folder) or "name the directory or file that holds them")
    return found


def _inside(folder: Folder) -> str:
    """Suggest folders with weights one level further in, as in the folder of a run."""
    if not isinstance(folder, LocalFolder):
        return ""
    with suppress(OSError):  # a folder that may not be looked into
        for inner in sorted(path for path in folder.path.iterdir() if path.is_dir()):
            if any(one.name.endswith(WEIGHTS) for one in inner.iterdir()):
                return f"there are weights in {inner}"
    return ""


def _check_foreign(folder: Folder, files: frozenset[str]) -> None:
    for name in sorted(files):
        kind = next((kind for end, kind in FOREIGN.items() if name.endswith(end)), None)
        if kind is not None:
            remedy = f"load it with {kind} and save its weights as safetensors"
            raise refusal(
                f"weights of PyTorch, safetensors or GGUF in {folder.place}", f"{name[:80]} of {kind}", remedy
            )


def _choose_kind(files: frozenset[str], suffixes: tuple[str, ...]) -> list[str]:
    """The usual name if it is there, else the only candidate, else the parts of one split file."""
    for usual in USUAL:
        if usual in files and usual.removesuffix(INDEX).endswith(suffixes):
            return [usual]
    indexes = sorted(name for name in files if name.endswith(tuple(suffix + INDEX for suffix in suffixes)))
    if len(indexes) == 1:
        return indexes
    weights = sorted(name for name in files if name.endswith(suffixes) and not OTHER.match(name))
    if len(weights) <= 1:
        return weights
    return complete_parts(weights[0], weights)


def complete_parts(first: str, files: list[str]) -> list[str]:
    """The files `stem-00001-of-0000N` that `files` consists of; fails when it holds others or lacks one."""
    part = PART.match(first)
    if part is None:
        raise refusal("one file of weights, or an index", f"{len(files)}, such as {', '.join(files[:3])}", "name one")
    count = int(part["count"])
    expected = [f"{part['stem']}-{number:05d}-of-{part['count']}{part['suffix']}" for number in range(1, count + 1)]
    if absent := [name for name in expected[: len(files) + 1] if name not in files]:
        raise refusal(f"all {count} parts of {part['stem']}", f"no {absent[0]}", "fetch it again")
    if len(files) != count:
        raise refusal("one file of weights, or an index", f"several, such as {files[0]} and {files[-1]}", "name one")
    return expected
