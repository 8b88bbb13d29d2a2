"""docs/architecture.md is a map: what it names is there, what is there it names, and no walk is long."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import torch

from family_cases import CASES
from locater import AttentionMonitor, LocAteR
from locater.cli.program import main
from locater.monitor import Terminal

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "locater"
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
HOUSES = ("locater", "locater_lab")
MOST_STATIONS = 20


def section(heading: str) -> str:
    return TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def walks() -> dict[str, list[str]]:
    """Each walk's stations, by its heading."""
    parts = re.split(r"^### (.*)$", section("Four walks"), flags=re.MULTILINE)[1:]
    return {
        name: re.findall(r"^\d+\. `([\w/.]+)`", body, flags=re.MULTILINE)
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


@pytest.mark.parametrize("house", HOUSES)
def test_every_room_is_on_the_map(house):
    text = section("The map").partition(f"Under `src/{house}/`")[2].partition("Under `src/")[0]
    named = set(re.findall(r"^\s*`?([\w/]+)/`?\s", text, flags=re.MULTILINE))
    files = (SOURCE / house).rglob("*.py")
    rooms = {path.parent.relative_to(SOURCE / house).as_posix() for path in files} - {"."}
    assert rooms == named, f"not on the map: {rooms - named}; not in the tree: {named - rooms}"


def test_every_file_that_is_named_exists():
    for name in re.findall(r"`([\w/]+\.py)`", TEXT):
        assert any((home / name).exists() for home in (PACKAGE, SOURCE, ROOT)), name


def test_there_are_four_walks_and_none_is_long():
    assert len(walks()) == 4
    for name, stations in walks().items():
        assert 4 <= len(stations) <= MOST_STATIONS, name


@contextmanager
def traced(called: dict[str, None]) -> Iterator[None]:
    """Note every file of the package whose functions are called, in the order of their first calls."""

    def trace(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(f"{PACKAGE}/"):
            called.setdefault(Path(code.co_filename).relative_to(PACKAGE).as_posix())

    sys.setprofile(trace)
    try:
        yield
    except SystemExit as end:
        assert not end.code
    finally:
        sys.setprofile(None)


@pytest.fixture
def llama():
    (case,) = (case for case in CASES if case.name == "llama")
    return case


def test_the_walk_of_a_scan_is_one(tmp_path, monkeypatch, llama):
    """Every station is called while the command scans a rotary model; up to the heads in the order of the page."""
    stations, called = walks()["A checkpoint's bytes through `scan`"], {}
    llama.save(llama.build(), tmp_path)
    monkeypatch.setattr(sys, "argv", ["locater", "scan", str(tmp_path)])
    import_module("locater.scanning.scan")
    with traced(called):
        main()
    assert [station for station in stations if station not in called] == []
    passed = [list(called).index(station) for station in stations[:12]]
    assert passed == sorted(passed), "stations up to the heads are passed in another order"


def test_the_walk_of_a_step_is_one(llama):
    """Every station is called while LocAteR is made and steps, on a model with latent attention too."""
    (latent,) = (case for case in CASES if case.name == "deepseek-v2")
    called: dict[str, None] = {}
    with traced(called):
        for model, mean in ((llama.build(), "initial"), (latent.build(), "free")):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            LocAteR(model, strength=0.1, mean=mean, optimizer=optimizer).step()
    assert [station for station in walks()["A training step with LocAteR"] if station not in called] == []


def test_the_walk_of_an_observation_is_one(llama, capsys):
    """Every station is called in a watched step, of a model whose attention is a kernel's and of one that wrote it."""
    called: dict[str, None] = {}
    with traced(called):
        for kind in ("sdpa", "eager"):
            model = llama.build()
            model.set_attn_implementation(kind)
            monitor = AttentionMonitor(model, every=1, sinks=[Terminal()])
            model(torch.arange(24)[None])
            monitor.step()
            monitor.detach()
    assert [station for station in walks()["One observation of the monitor"] if station not in called] == []


def test_the_walk_of_a_prediction_is_one(tmp_path, monkeypatch, llama, capsys):
    llama.save(llama.build(), tmp_path)
    short = ["--text", "random", "--window", "32", "--calibration", "4", "--test", "2"]
    monkeypatch.setattr(sys, "argv", ["locater", "predict", str(tmp_path), *short])
    import_module("locater.prediction.predict")
    called: dict[str, None] = {}
    with traced(called):
        main()
    assert [station for station in walks()["A prediction"] if station not in called] == []


def test_the_nouns_are_classes_of_the_package():
    nouns = re.findall(r"^\| `(\w+)` \| `([\w/]+\.py)`", section("Eleven nouns"), flags=re.MULTILINE)
    assert len(nouns) == 11
    for noun, home in nouns:
        assert re.search(rf"^class {noun}\b", (PACKAGE / home).read_text(encoding="utf-8"), flags=re.MULTILINE), noun
