"""Checksums of what a run writes, so that what decides its future is what it wrote itself; they tell damage and edits,
not a forger.

The chain: a checkpoint's `checksums.json` covers its files, `index.json` covers each `checksums.json` and the config,
and the two documents cover themselves.
"""

import hashlib
import json
from pathlib import Path

from locater.errors import Refusal, refusal
from locater.records import Json, check_beside, read_json

CHECKSUMS, SEAL = "checksums.json", "checksum"
UNVERIFIED = "restore it, or go on with what is there by --set verified=no"


def digest_of(document: object) -> str:
    """The same for every way to write the same values."""
    text = json.dumps(document, sort_keys=True, allow_nan=False)
    return hashlib.blake2b(text.encode()).hexdigest()[:32]


def seal(document: Json) -> Json:
    """The document with a checksum of itself."""
    return document | {SEAL: digest_of(document)}


def unseal(document: Json, path: Path, *, verified: bool = True) -> Json:
    """The document without its checksum, which must be right unless nothing is to be verified."""
    rest = {name: value for name, value in document.items() if name != SEAL}
    if verified and document.get(SEAL) != digest_of(rest):
        got = "another" if SEAL in document else "one without a checksum, as older versions wrote it"
        raise refusal(f"the document that a run wrote to {path}", got, UNVERIFIED)
    return rest


def checksums_of(folder: Path) -> dict[str, str]:
    """By file; what is not in it cannot be told from what the disk made of it."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != CHECKSUMS)
    return {path.name: checksum_of(path) for path in files}


def damaged_files(folder: Path, checksum: str | None = None) -> list[str]:
    """The files of a checkpoint that are not as they were written; `checksum` is that of its list."""
    if checksum is not None and checksum_of(folder / CHECKSUMS) != checksum:
        return [CHECKSUMS]
    try:
        kept = read_json(folder / CHECKSUMS)
    except Refusal:
        return [CHECKSUMS]
    return [name for name, checksum in kept.items() if checksum_of(folder / check_beside(name, CHECKSUMS)) != checksum]


def checksum_of(path: Path) -> str:
    """Hash a file's bytes; "none" where it cannot be read, or is no file."""
    if not path.is_file():
        return "none"
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()[:32]
    except OSError:
        return "none"
