"""`locater theory`, as a user runs it."""

import json
import subprocess
import sys

import numpy as np
import pytest

from command import locater
from saved_models import case_named

CHECKED = [1, 6, 12, 18, 24]
CLOSED = [0.092179, 0.141847, 0.523308, 0.880385, 0.648561]
EXACT = [0.021766, 0.093056, 0.542209, 0.915946, 0.764977]


@pytest.fixture
def matrix(tmp_path):
    """The example of the design: 0.6 on the diagonal and an asymmetric ripple."""
    i, j = np.mgrid[1:7, 1:7]
    path = tmp_path / "A.npy"
    np.save(path, 0.6 * (i == j) + 0.25 * np.sin(3 * i + 7 * j))
    return path


def document(*arguments):
    result = locater("theory", *arguments, "--json", "-")
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_check_values(matrix):
    found = document("--head", matrix, "--length", 24, "--method", "all")
    assert found["schema"] == "locater.theory/1"
    assert found["temperature"] == pytest.approx(6**0.5)
    profiles = found["profiles"]
    for t, closed, exact in zip(CHECKED, CLOSED, EXACT, strict=True):
        assert profiles["closed"][t - 1] == pytest.approx(closed, abs=5e-5)
        assert profiles["exact"][t - 1] == pytest.approx(exact, abs=5e-5)
        error = profiles["monte-carlo"]["standard_error"][t - 1]
        assert profiles["monte-carlo"]["mean"][t - 1] == pytest.approx(exact, abs=4 * error + 2 / 40_000)
    assert len(profiles["closed"]) == len(profiles["exact"]) == len(profiles["monte-carlo"]["mean"]) == 24
    assert found["regime"] == "late"


def test_factors_moments_and_matrix_agree(matrix, tmp_path):
    a = np.load(matrix)
    np.save(tmp_path / "Q.npy", a)
    np.save(tmp_path / "K.npy", np.eye(6))
    from_matrix = document("--head", matrix, "--length", 24)
    from_factors = document("--head", f"{tmp_path / 'Q.npy'},{tmp_path / 'K.npy'}", "--length", 24)
    moments = ("--moments", f"{np.trace(a)},{np.trace(a @ a)},{(a * a).sum()}")
    from_moments = document(*moments, "--temperature", 6**0.5, "--length", 24)
    assert from_factors == from_matrix
    assert from_moments["profiles"]["closed"] == pytest.approx(from_matrix["profiles"]["closed"], abs=1e-12)
    assert (from_moments["xi"], from_moments["eta"]) == pytest.approx((from_matrix["xi"], from_matrix["eta"]))


def test_temperature_of_factors_is_the_root_of_the_head(tmp_path):
    generator = np.random.default_rng(0)
    for name in "QK":
        np.save(tmp_path / f"{name}.npy", generator.normal(size=(4, 9)))
    assert document("--head", f"{tmp_path / 'Q.npy'},{tmp_path / 'K.npy'}")["temperature"] == 2


def test_what_is_printed_fits_a_terminal_of_80_columns(matrix):
    result = locater("theory", "--head", matrix, "--length", 24, "--method", "all")
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 80
    assert result.out.startswith("late: recent tokens pass on their signal")
    assert "0.0922" in result.out and "█" in result.out


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures(matrix, tmp_path, suffix):
    picture = tmp_path / f"deep/profile.{suffix}"
    assert locater("theory", "--head", matrix, "--length", 24, "--plot", picture).code == 0
    start = picture.read_bytes()[:8]
    assert start == (b"\x89PNG\r\n\x1a\n" if suffix == "png" else b"<?xml ve")


MOMENTS = ("--moments", "3,4,5")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--head", "gpt2"), 2, "--head expects MODEL:LAYER.HEAD"),
        (("--head", "A", *MOMENTS), 2, "not both"),
        (("--head", "A,B,C.npy"), 1, "NumPy file at A,B,C.npy"),
        (("--moments", "3,4"), 2, "three numbers"),
        ((*MOMENTS, "--temperature", 2, "--method", "exact"), 2, "needs the weights"),
        ((*MOMENTS, "--temperature", 2, "--method", "monte-carlo"), 2, "needs the weights"),
        (MOMENTS, 2, "give --temperature"),
        (("--moments", "3,4,1", "--temperature", 2), 1, "at least |tr A²|"),
        (("--head", "A", "--method", "guess"), 2, "guess"),
        (("--head", "A", "--length", 0), 1, "length of at least 1"),
        (("--head", "A", "--temperature", 0), 1, "temperature above 0"),
        (("--head", "A", "--temperature", 1e-320), 1, "a variance ‖A‖²/λ² that is a number, got inf"),
        (("--head", "A", "--temperature", "nan"), 1, "temperature above 0"),
        (("--head", "missing.npy"), 1, "NumPy file at missing.npy"),
        (("--head", "text.npy"), 1, "NumPy file"),
        (("--head", "oblong.npy"), 1, "square matrix"),
        (("--head", "nan.npy"), 1, "finite numbers"),
        (("--head", "words.npy"), 1, "real matrix"),
        (("--head", "A", "--plot", "picture.gif"), 1, ".png"),
        (("--head", "A", "--json", "/proc/nowhere/x.json"), 1, "cannot write"),
    ],
    ids=lambda value: None if isinstance(value, tuple | int) else value,
)
def test_bad_input_is_one_sentence(matrix, tmp_path, monkeypatch, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    np.save("oblong.npy", np.ones((2, 3)))
    np.save("nan.npy", np.full((2, 2), np.nan))
    np.save("words.npy", np.array([["a", "b"]]))
    (tmp_path / "text.npy").write_text("not an array")
    result = locater("theory", *(matrix if word == "A" else word for word in arguments))
    assert result.code == code, result.err
    assert words in result.err
    assert "Traceback" not in result.err
    if code == 1:
        assert len(result.err.strip().splitlines()) == 1


def test_help_does_not_import_torch():
    """By looking at what is loaded, not at the clock."""
    script = (
        "import sys; sys.argv = ['locater', '--help']\n"
        "from locater.cli import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        "heavy = {'torch', 'numpy', 'scipy', 'transformers', 'matplotlib', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "theory" in result.stdout and "scan" in result.stdout


@pytest.fixture(scope="module")
def diagram():
    result = locater("theory", "--phase-diagram", "--json", "-")
    assert result.code == 0, result.err
    return json.loads(result.out), result.err


def test_the_localized_region_avoids_both_collapses(diagram):
    """The paper's claim, with a true softmax; and the plane does have both collapses to avoid."""
    found, _ = diagram
    inside, outside = found["summary"]["localized"], found["summary"]["elsewhere"]
    assert inside["points"] > 50
    assert inside["entropy_collapse"] == inside["rank_collapse"] == 0
    assert outside["entropy_collapse"] > 50 and outside["rank_collapse"] > 20


def test_the_corners_of_the_plane_are_what_the_theory_says(diagram):
    found, printed = diagram
    middle = len(found["trace_over_temperature"]) // 2
    assert found["trace_over_temperature"][middle] == 0
    assert found["regime"][0][middle] == "uniform"
    assert found["rank_residual"][0][middle] < 0.1 and found["normalised_entropy"][0][middle] > 0.99
    assert found["normalised_entropy"][-1][middle] < 0.1
    assert {row[middle] for row in found["regime"]} <= {"uniform", "mixed", "no-signal"}
    assert found["regime"][0][0] == found["regime"][0][-1] == "middle"
    assert found["regime"][0][-4] == "late" and found["regime"][0][3] == "early"
    assert max(map(len, printed.splitlines())) <= 80
    assert found["independent_tokens"]["collapse_deviation"] == pytest.approx(4.86, abs=0.01)
    assert "beyond a deviation of 4.86 λ" in printed.replace("\n", " ")


def test_without_weights_an_example_is_shown_and_called_one():
    result = locater("theory", "--length", "32")
    assert result.code == 0 and "late" in result.out and "built-in example" in " ".join(result.err.split())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    case = case_named("gpt2")
    case.save(case.build(), folder)
    return folder


def test_a_head_of_a_checkpoint_is_the_scans(checkpoint, tmp_path):
    """Moments by `theory --head` and by `scan` are of the same weights, with the norm's gain, at the head's own λ."""
    document, scanned = tmp_path / "head.json", tmp_path / "scan.json"
    assert locater("theory", "--head", f"{checkpoint}:1.1", "--json", document).code == 0
    assert locater("scan", checkpoint, "--json", scanned).code == 0
    found = json.loads(document.read_text())
    (row,) = (row for row in json.loads(scanned.read_text())["heads"] if (row["layer"], row["head"]) == (1, 1))
    for name in ("trace", "trace_of_square", "frobenius_squared", "eta", "xi"):
        assert found[name] == pytest.approx(row[name], rel=1e-5)


def test_a_head_that_is_not_there_is_refused(checkpoint):
    result = locater("theory", "--head", f"{checkpoint}:1.99")
    assert result.code == 1 and "got 99" in result.err


def test_the_true_softmax_stands_beside_the_clipped_one(matrix):
    found = document("--head", matrix, "--length", 24)["softmax"]
    assert found["variance"] == pytest.approx((np.load(matrix) ** 2).sum() / 6)
    assert found["border"] == pytest.approx(2 * np.log(24))
    logits = np.sqrt(found["variance"]) * np.random.default_rng(0).normal(size=(20_000, 24))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert found["normalised_entropy"] == pytest.approx(-(p * np.log(p)).sum(-1).mean() / np.log(24), abs=0.005)
    assert "True softmax over 24 independent tokens" in locater("theory", "--head", matrix, "--length", 24).out


def test_depth_follows_the_spectrum_through_layers(matrix):
    found = document("--head", matrix, "--length", 24, "--depth", 3)["depth"]
    assert (found["layers"], len(found["attention alone"]["entropy"])) == (3, 3)
    assert found["trace"] == pytest.approx(np.trace(np.load(matrix)) / 6**0.5)
    # Averaging alone makes tokens alike; the stream beside it keeps them apart.
    assert found["residual and norm"]["residual"][-1] > 0.8
    assert all(0 < entropy < 1 for entropy in found["attention alone"]["entropy"])
    shown = locater("theory", "--head", matrix, "--length", 24, "--depth", 3)
    assert "Through 3 layers" in shown.out
    assert f"{found['residual and norm']['residual'][-1]:.3f}" in shown.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--moments", "1,1,1", "--temperature", 1),
            "--depth needs the weights",
        ),
        ((), "1 to 128 layers"),
    ],
)
def test_depth_that_cannot_be_known_is_refused(arguments, words):
    result = locater("theory", *arguments, "--depth", 0)
    assert result.code != 0
    assert words in result.err.replace("\n", " ")
