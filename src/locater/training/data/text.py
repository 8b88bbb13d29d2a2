"""Text from files and folders, cut into a training and a validation part."""

from dataclasses import dataclass
from pathlib import Path

from ...errors import refusal

HELD_OUT = 0.05
# How the parts are called where a folder has them; the second spelling is that of WikiText's own archive.
TRAIN = ("train.txt", "wiki.train.tokens")
VALID = ("valid.txt", "validation.txt", "wiki.valid.tokens")


@dataclass(frozen=True)
class Corpus:
    """A training text and one to validate on; `name` is for messages."""

    name: str
    train: str
    valid: str


def read_corpus(path: Path) -> Corpus:
    """The two files of a folder that has them; else all of its text in the order of names, the last part held out."""
    if not _exists(path):
        raise refusal("a text file, a folder, or the name of a data set", f"{path!s:.200}", "check the spelling")
    if path.is_file():
        return held_out(str(path), read_text(path))
    train, valid = _part(path, TRAIN), _part(path, VALID)
    if train and valid:
        return Corpus(str(path), read_text(train), read_text(valid))
    files = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file, path))
    if not files:
        raise refusal(f"text in {path}", "no files")
    return held_out(str(path), "\n".join(read_text(file) for file in files))


def would_read(path: Path, place: Path) -> bool:
    """Whether files that come to be in that place would count as text of this corpus."""
    path, place = path.resolve(), place.resolve()
    if not _exists(path) or not place.is_relative_to(path) or _is_hidden(place, path):
        return False
    return path.is_dir() and not all(_part(path, names) for names in (TRAIN, VALID))


def _part(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # such as a name too long to be one
        return False


def _is_hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def read_text(path: Path) -> str:
    """A UTF-8 text that is not empty."""
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8")
    except OSError as reason:
        raise refusal(f"a readable file {path}", reason.strerror or reason) from None
    except UnicodeDecodeError as reason:
        found = f"the byte 0x{reason.object[reason.start]:02x} at position {reason.start}"
        raise refusal(f"UTF-8 text in {path}", found, "convert it, for instance by iconv -t utf-8") from None
    if not text.strip():
        raise refusal(f"text in {path}", "an empty file" if not raw else "nothing but blanks")
    return text


def held_out(name: str, text: str) -> Corpus:
    """The last part of a text is for validation: from a line's start, or else a word's, where one is near."""
    cut = int(len(text) * (1 - HELD_OUT))
    nearest = int(len(text) * (1 - 2 * HELD_OUT))
    starts = (text.rfind(between, nearest, cut) + 1 for between in "\n ")
    cut = next(filter(None, starts), cut)
    if not text[:cut].strip() or not text[cut:].strip():
        raise refusal(f"enough text in {name} for training and validation", f"{len(text)} characters")
    return Corpus(name, text[:cut], text[cut:])
