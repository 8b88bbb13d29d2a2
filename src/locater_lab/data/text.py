"""Text from files and folders, cut into a training and a validation part; WikiText-2 through `datasets`."""

import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from locater.errors import missing, refusal

HELD_OUT = 0.05
WIKITEXT = "wikitext-2"
SECONDS = 5.0  # a hub that does not answer is not waited for
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
    """Tell whether files created in that place would count as text of this corpus."""
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
        raise refusal(f"text in {path}", "an empty file" if not raw else "nothing but whitespace")
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


def download() -> Corpus:
    """WikiText-2 at word level, from the hub or from what was downloaded before."""
    remedy = "name a folder with train.txt and valid.txt by --data PATH"
    try:
        from datasets import load_dataset
    except ImportError:
        raise missing("the package datasets, to download WikiText-2", remedy, extra="data") from None
    try:
        with _offline_if_silent():
            found = load_dataset("Salesforce/wikitext", "wikitext-2-v1")
    except Exception as reason:  # whatever a hub, a proxy or a disk may do
        raise refusal("WikiText-2 from the Hugging Face hub", f"{reason!s:.120}", remedy) from None
    train, valid = (_lines(found[part]["text"]) for part in ("train", "validation"))  # type: ignore
    return Corpus(WIKITEXT, train, valid)


def _lines(rows: Iterable[str]) -> str:
    """The text of which each row is a line: the hub's copy has lost the end of blank ones, which is a token too."""
    return "".join(row.rstrip("\n") + "\n" for row in rows)


@contextmanager
def _offline_if_silent() -> Iterator[None]:
    """Without an answer `datasets` would try again for half a minute; offline it goes straight to its cache."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = before or not answers(config.HF_ENDPOINT)
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def answers(address: str) -> bool:
    """Tell whether anything speaks HTTP there, be it an error."""
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=SECONDS).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True
