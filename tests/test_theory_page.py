"""Numbers in docs/theory.md are those of the kept rows."""

import json
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")


def rows_between(mark):
    """The cells of the table that stands between two comments."""
    body = TEXT.partition(f"<!-- {mark} -->\n")[2].partition(f"<!-- end of {mark} -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()[2:]]


def test_alignment_over_training():
    rows = json.loads((ROOT / "runs" / "studies" / "alignment.json").read_text(encoding="utf-8"))["rows"]
    expected = []
    for step in sorted({row["step"] for row in rows}):
        cells = [f"{step:,}"]
        for layer in (0, 1):
            some = [row for row in rows if (row["step"], row["layer"]) == (step, layer)]
            error = fmean(abs(row["entropy"] - row["theory"]) for row in some)
            cells += [f"{fmean(row[name] for row in some):.3f}" for name in ("entropy", "theory")] + [f"{error:.3f}"]
        expected.append(cells)
    assert rows_between("alignment") == expected
