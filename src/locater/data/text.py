"""Text from files and folders, cut into a training and a validation part."""

from dataclasses import dataclass
from pathlib import Path

from ..errors import refuse

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
    if not path.exists():
        raise refuse("a text file, a folder, or the name of a data set", path, "check the spelling")
    if path.is_file():
        return held_out(str(path), read_text(path))
    train, valid = (next((path / name for name in names if (path / name).is_file()), None) for names in (TRAIN, VALID))
    if train and valid:
        return Corpus(str(path), read_text(train), read_text(valid))
    files = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file, path))
    if not files:
        raise refuse(f"text in {path}", "no files")
    return held_out(str(path), "\n".join(read_text(file) for file in files))


def _is_hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def read_text(path: Path) -> str:
    """A UTF-8 text that is not empty."""
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8")
    except OSError as reason:
        raise refuse(f"a readable file {path}", reason.strerror or reason) from None
    except UnicodeDecodeError as reason:
        found = f"the byte 0x{reason.object[reason.start]:02x} at position {reason.start}"
        raise refuse(f"UTF-8 text in {path}", found, "convert it, for instance by iconv -t utf-8") from None
    if not text.strip():
        raise refuse(f"text in {path}", "an empty file" if not raw else "nothing but blanks")
    return text


def held_out(name: str, text: str) -> Corpus:
    """The last part of a text, from a line's start where there is one, is for validation."""
    cut = int(len(text) * (1 - HELD_OUT))
    line_start = text.rfind("\n", 0, cut) + 1
    cut = line_start or cut
    if not text[:cut].strip() or not text[cut:].strip():
        raise refuse(f"enough text in {name} for training and validation", f"{len(text)} characters")
    return Corpus(name, text[:cut], text[cut:])
