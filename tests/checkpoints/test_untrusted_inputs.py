"""Every public function and command that opens a stranger's file: one limit of time and one net."""

import json
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from test_damaged_files import write

import locater
from command import locater as command
from locater import budget
from locater.errors import Refusal, Unforeseen, callers_own, net
from locater.packages import EXAMPLE
from locater.prediction.predict import Tokens
from locater.scanning.compare import compare
from locater_lab.train.model import LanguageModel
from locater_lab.train.shape import Shape

LATE = "no answer within --timeout|Timeout"
NEVER = "someone/never-answers"
SHORT = 0.4


@pytest.fixture
def silent():
    """The address of a file on a server that takes every call and says nothing."""
    listener = socket.create_server(("127.0.0.1", 0))
    calls = []

    def accept() -> None:
        while True:
            try:
                calls.append(listener.accept())
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/model.safetensors"
    listener.close()
    for connection, _ in calls:
        connection.close()


@pytest.fixture
def hub(monkeypatch):
    """A hub that takes its time, for transformers and for our own reader."""
    pytest.importorskip("transformers")
    wait = threading.Event()
    monkeypatch.setattr("locater.prediction.language_model._loader", lambda *_: wait.wait(60))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: wait.wait(60))
    yield NEVER
    wait.set()


LIBRARY = {
    "scan": lambda source: locater.scan(locater.Stored(source, timeout=SHORT)),
    "heads": lambda source: list(locater.heads(locater.Stored(source, timeout=SHORT))),
    "compare": lambda source: compare([source, source], timeout=SHORT),
}
OF_THE_HUB = {
    **LIBRARY,
    "predict": lambda source: locater.predict(locater.Stored(source, timeout=SHORT)),
    "random": lambda source: locater.predict(locater.Stored(source, timeout=SHORT), text="random"),
}
COMMANDS = {
    "scan": ["scan", "{}"],
    "compare": ["compare", "{}", "{}"],
    "report": ["report", "{}"],
    "theory": ["theory", "--head", "{}:0.0"],
}
COMMANDS_OF_THE_HUB = {
    **COMMANDS,
    "predict": ["predict", "{}"],
    "random": ["predict", "{}", "--text", "random"],
    "study": ["study", "real-data", "--model", "{}"],
}


def run_late(arguments: list[str], source: str, folder: Path) -> str:
    out = ["--out", folder / "x"] if arguments[0] in ("report", "study") else []
    begun = time.monotonic()
    found = command(*(part.replace("{}", source) for part in arguments), "--timeout", SHORT, *out)
    assert found.code == 1 and time.monotonic() - begun < 10, found.err
    return found.err


@pytest.mark.parametrize("name", LIBRARY)
def test_a_silent_server_is_given_up(name, silent):
    begun = time.monotonic()
    with pytest.raises(Refusal, match=LATE):
        LIBRARY[name](silent)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("name", OF_THE_HUB)
def test_so_is_a_silent_hub(name, hub):
    begun = time.monotonic()
    with pytest.raises(Refusal, match=LATE):
        OF_THE_HUB[name](hub)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_have_the_option(name, silent, tmp_path):
    assert "--timeout" in (said := run_late(COMMANDS[name], silent, tmp_path)) or "Timeout" in said


@pytest.mark.parametrize("name", COMMANDS_OF_THE_HUB)
def test_and_for_the_hub(name, hub, tmp_path):
    assert "within --timeout" in run_late(COMMANDS_OF_THE_HUB[name], hub, tmp_path)


def test_one_limit_for_all_that_is_done_inside():
    with budget.limited(seconds=1) as outer, budget.limited(seconds=100) as inner:
        assert inner.deadline == outer.deadline
    with budget.limited(seconds=100) as outer, budget.limited(seconds=1) as inner, budget.limited() as innermost:
        assert innermost.deadline == inner.deadline < outer.deadline
    assert budget.budget() is budget.DEFAULT
    with pytest.raises(Refusal, match="a positive number of seconds"), budget.limited(seconds=0):
        pass


def test_what_is_late_is_refused_and_what_fails_fails_as_it_did():
    with budget.limited(seconds=5):
        assert budget.timed(lambda: budget.budget().deadline) is not None  # the limit is that of the caller
        with pytest.raises(KeyError, match="x"):
            budget.timed(lambda: {}["x"])
        with pytest.raises(TimeoutError, match="of its own"):
            budget.timed(lambda: (_ for _ in ()).throw(TimeoutError("of its own")))
    with budget.limited(seconds=0.05), pytest.raises(Refusal, match="no answer within --timeout"):
        budget.timed(lambda: time.sleep(1))


def test_heads_leave_no_limit_behind(tmp_path):
    """The limit is in force while a layer is read, not while the caller works with what he was given."""
    first = locater.heads(locater.Stored(write(tmp_path), timeout=100))
    second = locater.heads(locater.Stored(tmp_path, timeout=50))
    next(first), next(second), next(first)
    assert budget.budget() is budget.DEFAULT
    assert len([*first, *second]) == 13 and budget.budget() is budget.DEFAULT


def test_files_on_disk_have_no_limit(tmp_path):
    write(tmp_path)
    assert locater.scan(locater.Stored(tmp_path, timeout=1e-9)).heads and list(
        locater.heads(locater.Stored(tmp_path, timeout=1e-9))
    )


NETS = {
    "predict": ("locater.prediction.predict.load_model", lambda folder: locater.predict(folder)),
    "random": ("locater.prediction.predict.streamed", lambda folder: locater.predict(folder, text="random")),
    "compare": ("locater.scanning.compare.follow", lambda folder: compare([folder, folder])),
    "heads": ("locater.scanning.source.open_model", lambda folder: list(locater.heads(folder))),
}


@pytest.mark.parametrize("name", NETS)
def test_the_net_is_beneath_every_door(name, tmp_path, monkeypatch):
    place, act = NETS[name]
    monkeypatch.setattr(place, lambda *_, **__: {}["nobody thought of it"])
    with pytest.raises(Unforeseen, match=f"{tmp_path}.*KeyError at .*please report it"):
        act(write(tmp_path))


@pytest.mark.parametrize("place, arguments", [
    ("locater.report.reading.read_record", ["report", "scan.json", "-o", "page.html"]),
    ("locater.report.reading.read_record", ["explore", "scan.json", "-o", "page.html"]),
    ("locater_lab.studies.real_data.evidence", ["study", "real-data", "--model", "scan.json", "--out", "rows"]),
])  # fmt: skip
def test_commands_name_the_file_that_they_failed_on(place, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("scan.json").write_text(json.dumps({"schema": "locater.scan/1", "heads": []}))
    monkeypatch.setattr(place, lambda *_, **__: {}["nobody thought of it"])
    found = command(*arguments)
    assert found.code == 1 and "locater: scan.json: cannot read it" in found.err, found.err
    assert "please report it" in found.err and "Traceback" not in found.err


DAMAGES = [
    ("eta", "x"),
    ("eta", 10**400),
    ("layer", 10**400),
    ("eigenvalues", [[1, "x"]]),
    ("profiles", {"closed": 3}),
    ("head", None),
]


@pytest.mark.parametrize("key, value", DAMAGES)
def test_values_of_the_wrong_kind_are_the_documents(key, value, tmp_path):
    document = locater.scan(write(tmp_path / "model"), length=24, details=["eigenvalues", "curves"]).to_json()
    document["heads"][1][key] = value
    (tmp_path / "scan.json").write_text(json.dumps(document))
    found = command("report", tmp_path / "scan.json", "-o", tmp_path / "page.html")
    assert found.code == 1 and "scan.json" in found.err and "please report it" not in found.err, found.err


@pytest.mark.parametrize("moments", [("nan", "1", "1"), ("1", "nan", "1"), ("1", "1", "inf"), ("1", "1", "1e308")])
def test_moments_that_are_no_numbers(moments):
    found = command("theory", "--moments", ",".join(moments), "--temperature", 1)
    assert found.code == 1 and "three finite moments" in found.err


class Stop(Exception):
    pass


def stop(*_):
    raise Stop


def test_errors_of_the_callers_own_code_are_his():
    with pytest.raises(Stop), net("x"), callers_own():
        stop()
    with pytest.raises(Stop):
        locater.predict(EXAMPLE, text=Tokens(torch.randint(400, (8, 96))), progress=stop)
    model = LanguageModel(Shape(vocab_size=9, d_model=16))
    model.register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        locater.predict(model, text=Tokens(torch.randint(9, (8, 80))))


@pytest.mark.slow
def test_processes_take_the_limit_with_them(silent):
    with pytest.raises(Refusal, match=LATE):
        compare([silent, silent], jobs=2, timeout=SHORT)
