"""Quantised here and now by the tools themselves, where they are installed: other weights than those of the kept files.

`pip install --no-deps --target FOLDER mlx mlx-cpu optimum-quanto torchao compressed-tensors bitsandbytes`, then
`PYTHONPATH=FOLDER pytest tests/checkpoints/test_quantisers.py`.
"""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from test_quantised import FILES, KEY, QUERY, numbers, stored, write

ROOT = Path(__file__).parents[2]


def quantiser():
    spec = importlib.util.spec_from_file_location("quantise", ROOT / "dev" / "quantise.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOLS = quantiser()
METHODS = [method for method in TOOLS.METHODS if method != "quanto_int4"]  # it compiles for minutes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", METHODS)
def test_scan_equals_that_of_what_the_installed_tool_dequantises(method, tmp_path):
    for seed, dtype in ((1, torch.float32), (2, torch.float32), (3, torch.float16)):
        weights = {name: weight.to(dtype).float() for name, weight in TOOLS.originals(seed).items()}
        try:
            tensors, notes = TOOLS.made(method, weights)
        except ImportError as reason:
            pytest.skip(f"its tool is not installed: {reason}")
        settings = json.loads(notes.pop("quantization_config"))
        reference = {QUERY: tensors.pop("reference.q"), KEY: tensors.pop("reference.k")}
        quantised = write(tmp_path / f"quantised{seed}", tensors, settings, notes)
        plain = write(tmp_path / f"plain{seed}", reference, None)
        own, theirs = numbers(quantised), numbers(plain)
        # Weights agree to a unit in the last place, so traces that cancel to √(Σ of squared terms)·2⁻²³, 4e-8 of η.
        scale = torch.cat([theirs[:, 1:2], theirs[:, 1:2], torch.ones_like(theirs[:, :1])], 1)
        torch.testing.assert_close(own / scale, theirs / scale, rtol=1e-5, atol=1e-6)


def test_the_page_says_which_tool_wrote_each_file():
    page = (ROOT / "docs" / "families.md").read_text()
    named = {name: tool for name, tool in re.findall(r"^\| `(\w+)` \| (\S+ \S+) \|", page, re.MULTILINE)}
    assert named == {path.stem: stored(path)[2]["made_by"].split(",")[0] for path in FILES}
