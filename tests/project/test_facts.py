"""A fact stands once: what had two homes before, and drifted, is held to one."""

import ast
import re
from pathlib import Path

import pytest

from locater.cli.program import VERBS

SOURCE = Path(__file__).parents[2] / "src"
TEXTS = {
    path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8")
    for package in ("locater", "locater_lab")
    for path in sorted((SOURCE / package).rglob("*.py"))
}
HOMES = {
    "the name of a layer in logs": (r"layer_\{", "locater/records.py"),
    "the name of a head in logs": (r"head_\{", "locater/records.py"),
    "gathering a shard": (r"full_tensor", "locater/projections.py"),
    "whether backward runs": (r"_current_graph_task_id", "locater/attention/calls.py"),
    "the weights of η²": (r"ETA_WEIGHTS\w* *[:=]", "locater/spectra/moments.py"),
    "which regimes are localized": (r"^LOCALIZED\b", "locater/quantities.py"),
    "how near is near": (r"^NEAR\b", "locater/quantities.py"),
    "the length that a scan supposes": (r"^DEFAULT_LENGTH\b", "locater/scanning/__init__.py"),
    "suffixes of torch's files": (r'"\.ckpt"', "locater/checkpoints/sharded.py"),
}


@pytest.mark.parametrize("fact", HOMES)
def test_a_fact_has_one_home(fact):
    pattern, home = HOMES[fact]
    found = [name for name, text in TEXTS.items() if re.search(pattern, text, flags=re.MULTILINE)]
    assert found == [home]


def test_the_definition_of_locater_is_the_same_everywhere():
    """On every page that defines it, and in the glossary of every report."""
    pages = [SOURCE.parent / name for name in ("README.md", "docs/stabilisers.md", "docs/theory.md")]
    words = "the scale η; tr W is free unless you hold it"
    assert all(words in path.read_text(encoding="utf-8") for path in pages) and words in TEXTS["locater/quantities.py"]
    otherwise = re.compile(
        r"LocAteR\s+(?:\w+\s+)?(?:holds|keeps|fixes|localises|moves)\s+(?:the\s+|a\s+)?(?:mean|trace|tr W)"
    )
    shown = [SOURCE.parent / "README.md", *(SOURCE.parent / "examples").glob("*.py")]
    shown += [path for path in (SOURCE.parent / "docs").rglob("*") if path.suffix in (".md", ".ipynb")]
    shown += [path for path in SOURCE.rglob("*") if path.suffix in (".py", ".js", ".html")]
    assert not [path.name for path in shown if otherwise.search(path.read_text(encoding="utf-8"))]


def test_entropy_is_defined_in_one_room():
    """−Σ p log p of attention, by whatever form, outside of `attention` and the singular values' own."""
    pattern = re.compile(r"torch\.(special\.)?(xlogy|entr)\(")
    elsewhere = [
        name for name, text in TEXTS.items() if pattern.search(text) and not name.startswith("locater/attention/")
    ]
    assert set(elsewhere) <= {"locater/spectra/singular.py", "locater/theory/regimes.py"}, elsewhere


def test_everything_that_is_defined_is_used():
    """Every constant, function and class of the source is named again: there, in a test, a script or an entry point."""
    root = SOURCE.parent
    points = re.findall(r'= "locater[\w.]*:(\w+)"', (root / "pyproject.toml").read_text(encoding="utf-8"))
    used, defined = {*points, *VERBS}, {}
    for path in (path for folder in ("src", "tests", "bench", "runs", "dev") for path in (root / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                used.add(node.id)
            elif isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.alias):
                used.add(node.name)
        for node in tree.body if root / "src" in path.parents else ():
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            names += [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            defined |= {name: path for name in names if not name.startswith("__")}
    unused = {name: str(path) for name, path in defined.items() if name not in used}
    assert not unused
