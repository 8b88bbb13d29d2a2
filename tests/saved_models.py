"""Tiny models of the family cases on disk, made once per session."""

from functools import cache
from pathlib import Path

from family_cases import CASES
from locater import checkpoints
from locater.models import Config, open_model


@cache
def case_named(name: str):
    return next(case for case in CASES if case.name == name)


def heads_of(path: Path) -> dict:
    """The heads of a checkpoint, by block, layer and number."""
    with checkpoints.open(path) as checkpoint:
        layers = open_model(Config(checkpoint.config), checkpoint).layers()
        return {(head.block, head.layer, head.index): head for layer in layers for head in layer.heads}


def by_place(scan) -> dict:
    return {(row.block, row.layer, row.head): row for row in scan.heads}
