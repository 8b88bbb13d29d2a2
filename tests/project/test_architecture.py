"""docs/architecture.md is a map: what it names is there, what is there it names, and no walk is long."""

import ast
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from family_cases import CASES
from locater.cli.program import main

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "locater"
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
HOUSES = ("locater", "locater_lab")
MOST_STATIONS = 20


def section(heading: str) -> str:
    return TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def walks() -> dict[str, list[str]]:
    """Each walk's stations, by its heading."""
    parts = re.split(r"^### (.*)$", section("Four walks"), flags=re.MULTILINE)[1:]
    return {
        name: re.findall(r"^\d+\. `([\w/.]+)`", body, flags=re.MULTILINE)
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


@pytest.mark.parametrize("house", HOUSES)
def test_every_room_is_on_the_map(house):
    text = section("The map").partition(f"Under `src/{house}/`")[2].partition("Under `src/")[0]
    named = set(re.findall(r"^\s*`?([\w/]+)/`?\s", text, flags=re.MULTILINE))
    files = (SOURCE / house).rglob("*.py")
    rooms = {path.parent.relative_to(SOURCE / house).as_posix() for path in files} - {"."}
    assert rooms == named, f"not on the map: {rooms - named}; not in the tree: {named - rooms}"


def test_every_file_that_is_named_exists():
    for name in re.findall(r"`([\w/]+\.py)`", TEXT):
        assert any((home / name).exists() for home in (PACKAGE, SOURCE, ROOT)), name


def test_there_are_four_walks_and_none_is_long():
    assert len(walks()) == 4
    for name, stations in walks().items():
        assert 4 <= len(stations) <= MOST_STATIONS, name


@pytest.mark.parametrize("name", list(walks())[1:])
def test_a_walk_follows_the_imports(name):
    """Every station but the first is imported, directly or through its package, by one before it."""
    stations = walks()[name]
    for number, station in enumerate(stations[1:], start=1):
        assert any(imports(earlier, station) for earlier in stations[:number]), f"{name}: nobody calls {station}"


def test_the_walk_of_a_scan_is_one(tmp_path, monkeypatch):
    """Every station is called while the command scans a rotary model; up to the heads in the order of the page."""
    stations = walks()["A checkpoint's bytes through `scan`"]
    (case,) = (case for case in CASES if case.name == "llama")
    case.save(case.build(), tmp_path)
    monkeypatch.setattr(sys, "argv", ["locater", "scan", str(tmp_path)])
    import_module("locater.scanning.scan")
    called: dict[str, None] = {}

    def trace(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(f"{PACKAGE}/"):
            called.setdefault(Path(code.co_filename).relative_to(PACKAGE).as_posix())

    sys.setprofile(trace)
    try:
        main()
    except SystemExit as end:
        assert not end.code
    finally:
        sys.setprofile(None)
    assert [station for station in stations if station not in called] == []
    passed = [list(called).index(station) for station in stations[:13]]
    assert passed == sorted(passed), "stations up to the heads are passed in another order"


def imports(importer: str, imported: str) -> bool:
    wanted = {imported.removesuffix(".py").removesuffix("/__init__").replace("/", ".")}
    wanted |= {".".join(next(iter(wanted)).split(".")[:-1])}
    package = list(Path(importer).parent.parts)
    for node in ast.walk(ast.parse((PACKAGE / importer).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            names = {".".join(base), *(".".join([*base, alias.name]) for alias in node.names)}
            if names & wanted:
                return True
    return False


def test_the_nouns_are_classes_of_the_package():
    nouns = re.findall(r"^\| `(\w+)` \| `([\w/]+\.py)`", section("Eleven nouns"), flags=re.MULTILINE)
    assert len(nouns) == 11
    for noun, home in nouns:
        assert re.search(rf"^class {noun}\b", (PACKAGE / home).read_text(encoding="utf-8"), flags=re.MULTILINE), noun
