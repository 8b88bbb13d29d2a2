"""Pages that several commands write, and what they say of their making."""

import os
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.markup import escape

from ..errors import shown
from ..records import Json
from .output import console_for


def save_html(
    documents: list[Json],
    path: Path,
    *,
    title: str | None = None,
    when: float | None = None,
    note: str | None = None,
) -> None:
    """Write the page and say where; `when` is the date of what it shows, by default now; `note` is the sender's."""
    from ..report.page import save_page

    save_page(documents, path, title=title, facts=facts_of(when), note=note)
    console_for(None, aside=True).print(f"page: {escape(str(path))}", soft_wrap=True)


def facts_of(when: float | None) -> dict[str, str]:
    """Command, versions and date; SOURCE_DATE_EPOCH stands for now where builds must repeat."""
    moment = float(os.environ.get("SOURCE_DATE_EPOCH") or (datetime.now(UTC).timestamp() if when is None else when))
    date = datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M UTC")
    command = shown(shlex.join(["locater", *sys.argv[1:]]))
    versions = ", ".join(f"{name} {_version(name)}" for name in ("locater", "torch"))
    return {"command": command, "versions": f"{versions}, Python {sys.version.split()[0]}", "date of the results": date}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
