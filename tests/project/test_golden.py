"""`dev/golden.py` finds what changed, and what is kept there is what the code says now."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "dev" / "golden.py"
OLD = {"scan/a": {"place": ["decoder.0.0", "decoder.0.1"], "eta": [1.0, 100.0], "regime": ["late", None]}}


@pytest.fixture(scope="module")
def golden():
    spec = importlib.util.spec_from_file_location("golden", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def changed(**columns):
    return {"scan/a": OLD["scan/a"] | columns}


@pytest.mark.parametrize(
    ("new", "tolerance", "names"),
    [
        (changed(), 0.0, []),
        (changed(eta=[1.0 + 2**-50, 100.0]), 0.0, ["scan/a decoder.0.0 eta"]),
        (changed(eta=[1.0 + 2**-50, 100.0]), 1e-6, []),
        (changed(eta=[1.00001, 100.0]), 1e-6, ["scan/a decoder.0.0 eta"]),  # of its own η, not of the largest
        (changed(regime=["late", "mixed"]), 1e-6, ["scan/a decoder.0.1 regime"]),
        (changed(xi=[None, 0.5]), 1e-6, ["scan/a decoder.0.1 xi"]),
        (changed(place=["decoder.0.0", "decoder.1.1"]), 1e-6, ["scan/a: places"]),
        ({}, 1e-6, ["scan/a: places"]),
    ],
)
def test_every_difference_is_named(golden, new, tolerance, names):
    assert [where for where, *_ in golden.differences(OLD, new, tolerance)] == names


def test_a_sample_of_the_kept_numbers_is_found_again():
    """With room for other processors: bits are compared by hand, on the machine that recorded them."""
    only = ["scan/pip:locater", "live/gpt2", "monitor/t5-encoder", "predict/llama", "training/bert", "locater/gpt2"]
    command = [sys.executable, str(SCRIPT), "compare", "--tolerance", "1e-3", "--only", *only]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 numbers differ" in result.stdout
