"""`locater explore`: the theory as a page to play with, and the heads of a scan in it."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from locater.cli.output import console_for
from locater.cli.results import PagePath, facts_of, progress
from locater.errors import net, refusal

NUM_WALKS = 64
SEED = 0


def explore(
    scan: Annotated[Path | None, typer.Argument(metavar="[SCAN.json]", help="A scan, to mark its heads.")] = None,
    out: PagePath = Path("explore.html"),
) -> None:
    """Turn mean and spread of the eigenvalues and see which tokens are heard: one page, no network."""
    import torch

    from locater.report.reading import as_written, read_record
    from locater.theory.phase_diagram import phase_diagram

    from ..explorer.page import WIDTH, save_explorer

    with net(str(scan)):
        document = None if scan is None else read_record(scan)
    if document is not None and document["schema"] != "locater.scan/1":
        raise refusal(
            "a scan (locater.scan/1)", document["schema"], "make one with: locater scan MODEL --json SCAN.json"
        )
    console = console_for(None, aside=True)
    with progress("computing the plane and the exact grid", long=True) as tell:
        generator = torch.Generator().manual_seed(SEED)
        phase = phase_diagram(d_model=WIDTH, num_walks=NUM_WALKS, generator=generator, progress=tell)
        with as_written(str(scan)):
            save_explorer(out, phase, document, facts=facts_of(None if scan is None else scan.stat().st_mtime))
    console.print(f"page: {escape(str(out))}", soft_wrap=True)
