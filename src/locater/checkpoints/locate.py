"""From what a user names (a directory, a file, a hub id, an address) to its folder, and the file if it names one."""

import os
import re
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from ..errors import failed, refusal
from ..packaged import PREFIX, packaged
from .bytes import Folder, LocalFolder
from .sharded import INDEX, WEIGHTS


def locate(source: str | os.PathLike[str]) -> tuple[Folder, str | None]:
    """The folder, and the file in it if the source names one. What lies on disk wins over a hub id."""
    text = os.fspath(source)
    if text.startswith(PREFIX):
        text = packaged(text)
    if "://" in text:
        from .remote import locate_address  # far weights are rare

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
