"""Numbers in docs/theory.md are those of the kept rows."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest
import torch

from locater.spectra import Moments
from locater.theory import classify, closed_form, random_energy

ROOT = Path(__file__).parents[2]
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


def test_the_theorem_on_the_ladder():
    kept = json.loads((ROOT / "runs" / "studies" / "theorem.json").read_text(encoding="utf-8"))["models"]
    page = (ROOT / "docs" / "prediction.md").read_text(encoding="utf-8").partition("### The theorem on")[2]
    lines = [line for line in page.splitlines() if line.startswith("|")]
    assert len(kept) == 2 and all(one["command"] in page for one in kept)
    for line, row in zip(lines[2:5] + lines[7:10], [row for one in kept for row in one["rows"]], strict=True):
        said = [tuple(map(float, cell.split("/"))) for cell in line.strip("|").split("|")[1:]]
        measured = [numbers for name, numbers in row.items() if name != "reading"]
        for (correlation, error), numbers in zip(said, measured, strict=True):
            assert correlation == numbers["spearman"]
            assert error == pytest.approx(numbers["error"], abs=0.051 if error > 10 else 1e-9)


def word(trace, eta, length=1000):
    """Of a symmetric head at λ = 1."""
    one = torch.tensor(1.0, dtype=torch.float64)
    found = Moments(trace * one, eta**2 * one, eta**2 * one, d_model=64, d_head=64)
    return classify(closed_form.from_moments(found, length=length, temperature=1.0))


@pytest.mark.parametrize(("xi", "border"), [(50, 2.15), (10, 2.26), (5, 2.44), (3, 2.83)])
def test_the_border_of_middle_as_classified(xi, border):
    assert f"{border} λ for{' ξ =' if xi == 50 else ''} {xi}" in " ".join(TEXT.split())
    assert word(border - 0.01, (border - 0.01) / xi) != "middle"
    assert word(border + 0.01, (border + 0.01) / xi) == "middle"


@pytest.mark.parametrize(("length", "border"), [(128, 1.00), (1000, 1.02), (10_000, 1.02)])
def test_a_mean_of_zero_is_flat_up_to_the_said_scale(length, border):
    assert "η = 1.00 λ at T = 128 and 1.02 λ from T = 1,000 on" in " ".join(TEXT.split())
    assert word(0.0, border - 0.006, length) == "uniform"
    assert word(0.0, border + 0.006, length) == "mixed"
    assert word(0.0, 27.5, length) == "mixed"
    assert word(0.0, 27.7, length) == "no-signal"
    assert word(0.0, 3 / length, length) == "mixed"


def test_rotary_decoders_of_the_kept_rows():
    models = json.loads((ROOT / "runs" / "studies" / "real-data.json").read_text(encoding="utf-8"))["models"]
    rotary = [model for model in models if model["kind"] == "rotary decoders"]
    assert (len(rotary), sum(model["heads"] for model in rotary)) == (4, 398)
    relations = sorted(model["theory"]["xi"] for model in rotary)
    assert (f"{relations[-1]:.2f}", f"{relations[0]:.2f}") == ("-0.27", "-0.73")
    assert "with 398 heads" in " ".join(TEXT.split()) and "−0.27 to −0.73" in " ".join(TEXT.split())
