"""The table of better LocAteRs in docs/reproduction.md is what the kept rows say; a row that is gone is seen."""

import math
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "runs"))
import candidates  # noqa: E402
import unstable  # noqa: E402


@pytest.fixture
def kept(monkeypatch) -> candidates.Runs:
    def train_small(*arguments, **options):
        raise AssertionError("a row is missing")

    monkeypatch.setattr(candidates, "train_small", train_small)
    return candidates.Runs(candidates.KEPT, 3000)


def test_the_page_has_the_table_of_the_rows(kept):
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    missing = [line for line in kept.table(candidates.ARMS) if line not in page]
    assert not missing, "write it anew: python runs/candidates.py"
    missing = [line for line in unstable.told(kept) if line not in page]
    assert not missing, "write it anew: python runs/unstable.py"


def test_a_missing_row_is_seen(monkeypatch, kept, tmp_path):
    with pytest.raises(AssertionError, match="a row is missing"):
        candidates.Runs(tmp_path, 3000).loss("none", 0.0, 5e-3, 0)


def test_a_grid_is_widened_where_its_winner_is_at_the_edge():
    assert candidates.lowest((1.0, 2.0, 4.0), lambda value: -value) == 16.0
    assert candidates.lowest((1.0, 2.0, 4.0), lambda value: abs(value - 2)) == 2.0
    assert candidates.lowest((0.0,), lambda value: 0.0) == 0.0


def test_moments_are_those_of_the_matrix():
    attention = torch.nn.Module()
    attention.query, attention.key = (torch.nn.Linear(8, 8, bias=False) for _ in range(2))
    attention.d_head = 4
    eta, trace = candidates.moments(attention)
    for head, (query, key) in enumerate(zip(*candidates.blocks(attention), strict=True)):
        matrix = (key.mT @ query / math.sqrt(4)).detach()
        expected = (matrix.square().sum() + (matrix @ matrix).trace()) / 2
        assert float(eta[head].detach()) == pytest.approx(float(expected), rel=1e-5)
        assert float(trace[head].detach()) == pytest.approx(float(matrix.trace()), rel=1e-4, abs=1e-6)


def test_orthogonal_steps_have_equal_singular_values():
    values = torch.linalg.svdvals(candidates.orthogonal(torch.randn(3, 4, 16)))
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3
