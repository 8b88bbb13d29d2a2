"""Imports point down: the order of the layers, held by a test."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "locater"
# Lowest first; names on one line do not import each other.
LAYERS = [
    {"errors"},
    {"budget", "records", "packaged", "positions", "projections", "spectra"},
    {"documents"},
    {"head"},
    {"theory"},
    {"report"},
    {"attention"},
    {"models"},
    {"checkpoints"},
    {"scanning", "stabilisers", "monitor"},
    {"integrations", "training"},
    {"prediction"},
    {"studies"},
    {"cli"},
]
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    """The top-level parts of the package that a file imports at run time, wherever in the file it does so."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in list(ast.walk(tree)):  # what only the type checker sees is no import
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    depth = len(path.relative_to(PACKAGE).parts)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(name.name.split(".")[0] == "locater" for name in node.names), f"{path}: use relative imports"
        if isinstance(node, ast.ImportFrom):
            assert node.level or node.module.split(".")[0] != "locater", f"{path}: use relative imports"
            if node.level == depth:
                found |= {node.module.split(".")[0]} if node.module else {name.name for name in node.names}
    found.discard("__version__")  # the package's own
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    part = part_of(path)
    if part == "__init__":
        return
    assert part in HEIGHT, f"{part} has no layer yet: give it one"
    for other in imported_parts(path) - {part}:
        assert HEIGHT[other] < HEIGHT[part], f"{part} imports {other}, which is not below it"


def test_the_order_itself_would_notice():
    assert imported_parts(PACKAGE / "head.py") >= {"errors", "positions", "projections"}
