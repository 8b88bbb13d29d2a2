"""The project's fuzzer (dev/fuzz): a sample of its cases, ten minutes of them in the long proofs, and its own eyes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

FUZZ = Path(__file__).parents[2] / "dev" / "fuzz"
SAMPLE = ("safetensors", "sharded", "torch", "legacy", "gguf", "distributed", "adapter", "layout", "tokens")


@contextmanager
def fuzzer() -> Iterator[None]:
    sys.path.insert(0, str(FUZZ))
    try:
        yield
    finally:
        sys.path.remove(str(FUZZ))


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    with fuzzer():
        from seeds import write_all
    folder = tmp_path_factory.mktemp("seeds")
    write_all(folder, SAMPLE[:-1])
    return folder


def test_a_sample_is_read_right_or_refused(seeds, tmp_path):
    command = [sys.executable, FUZZ / "campaign.py", ",".join(SAMPLE), "0", "25", seeds, tmp_path]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["failures"] == [] and found["peak"] < 1000
    assert found["counts"]["read"] > 20 and found["counts"]["refused"] > 100


def test_what_is_not_the_files_is_noticed(seeds):
    with fuzzer():
        import formats

        tensors, scan = formats.read_and_scan(seeds / "safetensors")
        check = formats.check_safetensors
        assert check(seeds / "safetensors", (tensors, scan), None) is None
        one = scan.heads[0]
        wrong = replace(scan, heads=(replace(one, trace=one.trace + one.frobenius_squared**0.5), *scan.heads[1:]))
        assert check(seeds / "safetensors", (tensors, wrong), None) == "moments that are not the file's"
        fewer = replace(scan, heads=tuple(row for row in scan.heads if row.layer == 0))
        assert check(seeds / "safetensors", (tensors, fewer), None) == "COMPLETE, with layers missing"
        name = next(iter(tensors))
        moved = tensors | {name: tensors[name] + 1}
        assert "differs from the file" in check(seeds / "safetensors", (moved, scan), None)
        numbers = formats.readings.gguf(seeds / "gguf" / "model.gguf")
        assert all(np.isfinite(values).all() for values in numbers.values()) and len(numbers) == 7


@pytest.mark.slow
def test_ten_minutes_of_it():
    result = subprocess.run([sys.executable, str(FUZZ), "--minutes", "10"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:]
