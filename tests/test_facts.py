"""A fact stands once: what had two homes before, and drifted, is held to one."""

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "locater"
TEXTS = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
HOMES = {
    "the name of a layer in logs": (r"layer_\{", "records.py"),
    "the name of a head in logs": (r"head_\{", "records.py"),
    "gathering a shard": (r"full_tensor", "projections.py"),
    "whether backward runs": (r"_current_graph_task_id", "attention/calls.py"),
    "the weights of η²": (r"ETA_WEIGHTS\w* *[:=]", "spectra/moments.py"),
    "which regimes are localized": (r"^LOCALIZED\b", "theory/words.py"),
    "how near is near": (r"^NEAR\b", "attention/statistics.py"),
    "the length that a scan supposes": (r"^DEFAULT_LENGTH\b", "scanning/__init__.py"),
    "suffixes of torch's files": (r'"\.ckpt"', "checkpoints/locate.py"),
}


@pytest.mark.parametrize("fact", HOMES)
def test_a_fact_has_one_home(fact):
    pattern, home = HOMES[fact]
    found = [name for name, text in TEXTS.items() if re.search(pattern, text, flags=re.MULTILINE)]
    assert found == [home]


def test_entropy_is_defined_in_one_room():
    """−Σ p log p of attention, by whatever form, outside of `attention` and the singular values' own."""
    pattern = re.compile(r"torch\.(special\.)?(xlogy|entr)\(")
    elsewhere = [name for name, text in TEXTS.items() if pattern.search(text) and not name.startswith("attention/")]
    assert set(elsewhere) <= {"spectra/singular.py", "theory/regimes.py"}, elsewhere
