"""A scan with its progress, for the commands that make one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import Refusal
from .progress import progress

if TYPE_CHECKING:
    from ..scanning.scan import Scan


def raise_refused(sentences: Sequence[str]) -> None:
    """Exit 1 where something was not read, after all that was read has been shown."""
    if sentences:
        first, *others = sentences
        raise Refusal(first + (f" (and {len(others)} more)" if others else ""))


def scan_with_progress(source: str, options: dict[str, Any]) -> "Scan":
    from ..scanning.scan import scan as run

    with progress(f"scanning {source}", steps="layers") as tell:
        return run(source, progress=tell, **options)
