"""Numbers in docs/theory.md are those of the kept rows."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest
import torch

from locater.theory import random_energy

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


def test_words_of_the_true_softmax():
    kept = json.loads((ROOT / "runs" / "studies" / "softmax.json").read_text(encoding="utf-8"))["rows"]
    words = Counter((row["result"]["regime"], row["result"]["softmax_regime"]) for row in kept)
    expected = []
    for word in ("early", "late", "middle", "mixed", "uniform"):
        instead = [(count, other) for (said, other), count in words.items() if said == word != other]
        cells = [word, str(sum(count for (said, _), count in words.items() if said == word)), str(words[word, word])]
        ordered = sorted(instead, key=lambda pair: (-pair[0], pair[1]))
        expected.append([*cells, ", ".join(f"{other} {count}" for count, other in ordered)])
    assert rows_between("words") == expected


def test_entropies_of_the_random_energy_law():
    text = " ".join(TEXT.split())
    found = re.search(r"still ([\d.]+) of ln n for 16 tokens, ([\d.]+) for 128, ([\d.]+) for 1,024", text)
    for said, count in zip(found.groups(), (16, 128, 1024), strict=True):
        border = torch.tensor(random_energy.border(count), dtype=torch.float64)
        share = float(random_energy.mean_entropy(border, count)) / math.log(count)
        assert float(said) == pytest.approx(share, abs=0.005)
    found = re.search(r"λ = ([\d.]+) for 16 to 128 tokens, ([\d.]+) for 1,024, ([\d.]+) for 8,192", text)
    for said, count in zip((found[1], *found.groups()), (16, 128, 1024, 8192), strict=True):
        assert float(said) == pytest.approx(math.sqrt(random_energy.collapse_variance(count, 0.25)), abs=0.05)
