"""Imports point down: the order of the layers of both packages, and the library below the laboratory."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
# Lowest first; names on one line do not import each other.
LAYERS = {
    "locater": [
        {"errors"},
        {"budget", "packages", "reference", "texts", "positions", "projections", "spectra"},
        {"records", "head", "quantities"},
        {"attention", "behaviour"},
        {"theory"},
        {"report", "models"},
        {"checkpoints"},
        {"scanning", "stabilisers", "monitor"},
        {"integrations", "prediction"},
        {"cli"},
    ],
    "locater_lab": [
        {"fields", "rivals", "explorer"},
        {"data"},
        {"train"},
        {"studies", "demo"},
        {"cli"},
    ],
}
HEIGHT = {
    (package, name): height
    for package, layers in LAYERS.items()
    for height, names in enumerate(layers)
    for name in names
}
FILES = sorted(path for package in LAYERS for path in (SOURCE / package).rglob("*.py"))


def imported_modules(path: Path) -> Iterator[str]:
    """The modules that a file imports at run time, by their full names, wherever in the file it does so."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in list(ast.walk(tree)):  # what only the type checker sees is no import
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    package = path.relative_to(SOURCE).parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        if isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            assert node.level or base[0] != package[0], f"{path}: use relative imports"
            yield from (".".join([*base, name.name]) for name in node.names)


def imported_parts(path: Path) -> set[tuple[str, str]]:
    """The top-level parts of both packages that a file imports."""
    names = (name.split(".") for name in imported_modules(path))
    found = {(name[0], name[1]) for name in names if name[0] in LAYERS and len(name) > 1}
    return {part for part in found if part[1] != "__version__"}  # the package's own


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path):
    package, part = path.relative_to(SOURCE).parts[:2]
    part = part.removesuffix(".py")
    if part == "__init__":
        return
    assert (package, part) in HEIGHT, f"{part} has no layer yet: give it one"
    for other in imported_parts(path) - {(package, part)}:
        if other[0] == package:
            assert HEIGHT[other] < HEIGHT[package, part], f"{part} imports {other[1]}, which is not below it"


@pytest.mark.parametrize("path", [path for path in FILES if path.is_relative_to(SOURCE / "locater")], ids=str)
def test_the_library_never_imports_the_laboratory(path):
    assert not [name for name in imported_modules(path) if name.split(".")[0] == "locater_lab"]


def test_no_string_of_the_library_names_a_module_of_the_laboratory():
    """It could be imported, too; the bare name of the package may stand in a list of packages."""
    library = (SOURCE / "locater").rglob("*.py")
    assert not [str(path) for path in library if "locater_lab." in path.read_text(encoding="utf-8")]


def test_the_order_itself_would_notice():
    assert imported_parts(SOURCE / "locater" / "head.py") >= {
        ("locater", "errors"),
        ("locater", "positions"),
        ("locater", "projections"),
    }
    assert ("locater", "errors") in imported_parts(SOURCE / "locater_lab" / "fields.py")
    assert ("locater_lab", "fields") in imported_parts(SOURCE / "locater_lab" / "data" / "sources.py")


def test_the_library_works_without_the_laboratory():
    """As where only its files are installed: every module is imported, a scan is made, help has no laboratory."""
    code = (
        "import importlib, pkgutil, sys\n"
        "sys.modules['locater_lab'] = None\n"
        "import importlib.metadata as metadata\n"
        "metadata.entry_points = lambda **wanted: metadata.EntryPoints()\n"
        "import locater, locater.cli.program\n"
        "for module in pkgutil.walk_packages(locater.__path__, 'locater.'):\n"
        "    if not module.name.startswith('locater.integrations.') and not module.name.endswith('__main__'):\n"
        "        importlib.import_module(module.name)\n"
        "assert len(locater.scan('pip:locater').heads)\n"
        "sys.argv = ['locater', '--help']\n"
        "locater.cli.program.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "scan" in done.stdout and "Laboratory" not in done.stdout


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.is_relative_to(SOURCE / "locater_lab" / "cli")], ids=str
)
def test_every_verb_can_be_imported_first(path):
    """Neither package waits for the other, whichever is imported first; and no torch is loaded for help."""
    name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
