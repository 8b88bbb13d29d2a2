"""The pages are whole: tables render, names exist, costs are those that were measured."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")])
INSTANCES = {"head", "locater", "model", "monitor", "result", "torch"}  # names of others, which modules have too
CODE = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)


def page_text(path: Path) -> str:
    """A page without its blocks of code."""
    return CODE.sub("", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_table_has_a_heading(page):
    """Rows behind a blank line would be shown as text."""
    for table in re.finditer(r"(?:^\|.*\n?)+", page_text(page), flags=re.MULTILINE):
        rows = table[0].splitlines()
        assert len(rows) > 1 and re.fullmatch(r"\|[\s:|-]+\|", rows[1].strip()), rows[0]


def defined_names() -> dict[str, set[str]]:
    """The names that modules define or import at their top, by the last part of the module's name."""
    names: dict[str, set[str]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        stem = path.parent.name if path.stem == "__init__" else path.stem
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.setdefault(stem, set()).add(node.name)
            elif isinstance(node, ast.ImportFrom | ast.Import):
                names.setdefault(stem, set()).update(alias.asname or alias.name for alias in node.names)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.setdefault(stem, set()).add(node.id)
    return names


def test_functions_that_the_pages_name_exist():
    """`module.function(…)` where the module is one of ours."""
    names = defined_names()
    for page in [path for path in PAGES if path.name != "migration.md"]:  # which lists former names
        for code in re.findall(r"`([^`\n]+)`", page_text(page)):
            for module, function in re.findall(r"(?<![\w.])(?:locater\.)?(?:\w+\.)*(\w+)\.(\w+)\(", code):
                known = names.get(module, {function})
                assert module in INSTANCES or function in known, f"{page.name}: {module}.{function}"


def test_costs_of_stabilisers_are_those_that_were_measured():
    results = (ROOT / "bench" / "RESULTS.md").read_text(encoding="utf-8")
    page = " ".join((ROOT / "docs" / "stabilisers.md").read_text(encoding="utf-8").split())
    pattern = r"LocAteR adds (\S+) % decoupled and (\S+) % in the loss .*?σReparam (\S+) %, QK-Clip (\S+) %"
    said = re.search(pattern, page)
    assert said
    names = "LocAteR, decoupled", "LocAteR, in the loss", "σReparam", "QK-Clip"
    for name, cost in zip(names, said.groups(), strict=True):
        measured = re.search(rf"^{name}[^%\n]*?([\d.]+)%", results, flags=re.MULTILINE)
        half = 0.51 * 10.0 ** -len(cost.partition(".")[2])
        assert measured and float(cost) == pytest.approx(float(measured[1]), abs=half), name
