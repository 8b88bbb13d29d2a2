"""The page of evidence: agreement counted by hand, and a model from end to end."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from locater import scan
from locater.cli import app
from locater.studies.real_data import compared, page
from predict_cases import model, save_with_tokenizer


def test_words_and_ranks_are_counted():
    row = scan(model("llama")).heads[0]
    cells = [(0.9, "late"), (0.8, "early"), (0.1, "late"), (0.5, "mixed")]
    rows = [replace(row, head=n, xi=float(n), estimated_near_mass=v, regime=r) for n, (v, r) in enumerate(cells)]
    measured = [[0.9, 0.1, 0.0], [0.4, 0.2, 0.1], [0.2, 0.3, 0.2], [0.6, 0.4, 0.3]]
    found = compared("x", rows, measured=measured, probed=measured[::-1], predicted=measured)
    assert found["words"] == {"near": (1, 2), "far": (1, 1)}
    assert found["regimes"] == {"late": (1, 2), "early": (1, 1)}
    assert found["prediction"]["normalised_entropy"] == pytest.approx(1)
    assert found["probe"]["normalised_entropy"] == pytest.approx(-1)
    assert found["theory"]["xi"] == pytest.approx(-0.4)
    assert found["estimate_error"] == pytest.approx((0 + 0.4 + 0.1 + 0.1) / 4)
    assert "| x | 4 | -0.40 |" in page([found]) and "1 of 2 (50%)" in page([found])


def test_command(tmp_path):
    save_with_tokenizer(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, again and again. " * 400)
    net = model("llama")
    net.config.max_position_embeddings = 512
    net.save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["study", "real-data", "--model", str(tmp_path), "--text", str(text)])
    assert result.exit_code == 0, result.output
    assert "| model | heads |" in result.output and "| 8 |" in result.output
    assert CliRunner().invoke(app, ["study", "real-data"]).exit_code != 0
