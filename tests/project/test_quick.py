"""`make test-quick` touches every package of the library, and the laboratory."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

TESTS = Path(__file__).resolve().parents[1]
SOURCE = TESTS.parent / "src"
INNER = (path.parent.relative_to(SOURCE).parts for path in SOURCE.glob("locater/*/__init__.py"))
PACKAGES = [*sorted(map(".".join, INNER)), "locater_lab"]


def imported_modules(path: Path) -> set[str]:
    """Names of the modules that a test file imports, or imports something from."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_every_package_has_a_quick_file():
    quick = [path for path in TESTS.rglob("test_*.py") if "pytest.mark.quick" in path.read_text(encoding="utf-8")]
    names = {name for path in quick for name in imported_modules(path)}
    without = [package for package in PACKAGES if not any(f"{name}.".startswith(f"{package}.") for name in names)]
    assert PACKAGES and not without
