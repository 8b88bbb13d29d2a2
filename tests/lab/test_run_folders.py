"""Every single edit of a run's folder: refused, with the folder left as it is, or resumed equal to the bit."""

import json
import os
import random
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from command import locater
from locater.errors import Refusal, Unforeseen
from locater_lab.train import run
from locater_lab.train.checksums import seal
from locater_lab.train.config import GROUPS
from training_cases import STATEFUL, assert_same_run, tiny, write_text

SHORT = dict(steps=12, save_every=3, validate_every=4, log_every=2, **STATEFUL)
CONFIG, INDEX = "config.json", "checkpoints/index.json"


def quiet(sentence: str) -> None:
    pass


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run whole and stopped half-way; others of another seed, and of another length, stopped there too."""
    with pytest.MonkeyPatch.context() as patched:
        folder = tmp_path_factory.mktemp("runs")
        patched.setenv("LOCATER_CACHE", str(folder / "cache"))
        text = write_text(folder)
        run.start(tiny(text, **SHORT), folder / "whole", say=quiet)
        changes = {"run": {}, "other": {"seed": 1}, "longer": {"steps": 16}}
        for name, changed in changes.items():
            run.start(tiny(text, **SHORT | changed), folder / name, stop_after=7, say=quiet)
        yield folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def files_of(runs: Path) -> list[str]:
    return sorted(contents(runs / "run"))


def outcome(runs: Path, folder: Path, edit) -> str:
    """Make the edit in a copy and resume it: `refused`, or `equal`; fails on a run that became another."""
    shutil.copytree(runs / "run", folder)
    edit(folder)
    before = contents(folder)
    try:
        run.resume(folder, say=quiet)
    except Refusal as reason:
        assert not isinstance(reason, Unforeseen) and contents(folder) == before, str(reason)
        return "refused"
    assert_same_run(folder, runs / "whole")
    names = [json.loads((one / INDEX).read_text())["names"] for one in (folder, runs / "whole")]
    assert names[0] == names[1]
    for name in set(names[0].values()):
        states = [
            json.loads((one / "checkpoints" / name / "state.json").read_text()) for one in (folder, runs / "whole")
        ]
        assert [states[0][key] for key in ("step", "best")] == [states[1][key] for key in ("step", "best")]
    return "equal"


def test_a_folder_that_nobody_touched_goes_on(runs, tmp_path):
    assert outcome(runs, tmp_path / "run", lambda folder: None) == "equal"


def other_value(value):
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value * 1.5 + 0.125
        case _:
            return f"{value}x"


WORDS = {"optimizer": "adam", "schedule": "cosine", "hold": "penalty", "tokenizer": "words", "mean": "1.25"}
ENTRIES = [(group, one.name) for group, kind in GROUPS.items() for one in fields(kind) if one.init]


@pytest.mark.parametrize("sealed", [False, True], ids=["edited", "as another run's"])
def test_every_entry_of_the_config(sealed, runs, tmp_path):
    for number, (group, name) in enumerate(ENTRIES):

        def edit(folder, group=group, name=name):
            document = json.loads((folder / CONFIG).read_text())
            document[group][name] = WORDS.get(name) or other_value(document[group][name])
            document.pop("checksum")
            (folder / CONFIG).write_text(json.dumps(seal(document) if sealed else document))

        assert outcome(runs, tmp_path / str(number), edit) == "refused", (group, name)


def damage(kind: str, name: str, runs: Path, draw: random.Random):
    def edit(folder: Path) -> None:
        path = folder / name
        data = bytearray(path.read_bytes())
        match kind:
            case "removed":
                path.unlink()
                return
            case "emptied":
                data.clear()
            case "truncated":
                del data[draw.randrange(len(data)) :]
            case "flipped":
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            case "appended":
                data += b"{}\n"
            case source:
                donor = runs / source / name
                data = bytearray(donor.read_bytes()) if donor.exists() else data
        path.write_bytes(data)

    return edit


KINDS = ["removed", "emptied", "truncated", "flipped", "appended", "other", "longer"]


def check_files(runs: Path, folder: Path, *, kind: str, rounds: int) -> dict[str, int]:
    draw, found = random.Random(kind), {"refused": 0, "equal": 0}
    for number in range(rounds):
        for name in files_of(runs):
            place = folder / f"{number}-{name.replace('/', '-')}"
            found[outcome(runs, place, damage(kind, name, runs, draw))] += 1
            shutil.rmtree(place)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_of_the_folder(kind, runs, tmp_path):
    found = check_files(runs, tmp_path, kind=kind, rounds=1)
    assert found["refused"] >= 5, found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["truncated", "flipped"])
def test_every_file_of_the_folder_many_times(kind, runs, tmp_path):
    print(kind, check_files(runs, tmp_path, kind=kind, rounds=40))


@pytest.mark.parametrize("source", ["other", "longer", "whole"])
@pytest.mark.parametrize("part", ["last", "best", "checkpoints"])
def test_a_checkpoint_of_another_run(part, source, runs, tmp_path):
    def edit(folder: Path) -> None:
        names = [json.loads((one / INDEX).read_text())["names"] for one in (folder, runs / source)]
        ours, theirs = (one.get(part, "") for one in names)
        shutil.rmtree(folder / "checkpoints" / ours)
        shutil.copytree(runs / source / "checkpoints" / theirs, folder / "checkpoints" / ours)

    expected = "equal" if (part, source) == ("checkpoints", "whole") else "refused"
    names = [json.loads((runs / one / INDEX).read_text())["names"] for one in ("run", source)]
    same_best = part == "best" and names[0]["best"] == names[1]["best"] and source == "whole"
    assert outcome(runs, tmp_path / "run", edit) in ({"equal", "refused"} if same_best else {expected, "refused"})


def forge_line(folder: Path) -> None:
    """A line of the last checkpoint's step behind those that it knows of."""
    step = json.loads((folder / INDEX).read_text())["names"]["last"].removeprefix("step-")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "validation", "step": int(step), "loss": 0.5}) + "\n")


def repeat_last_line(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines()[-1] + "\n")


def plant_checkpoint(kind: str):
    """What no index names, under the name of a checkpoint to come."""

    def edit(folder: Path) -> None:
        planted, last = (
            folder / "checkpoints" / "step-00000009",
            json.loads((folder / INDEX).read_text())["names"]["last"],
        )
        match kind:
            case "folder":
                shutil.copytree(folder / "checkpoints" / last, planted)
            case "link":
                planted.symlink_to(last)
            case "broken link":
                planted.symlink_to("nowhere")
            case "file":
                planted.write_text("{}")

    return edit


def add_to_checkpoint(folder: Path) -> None:
    last = folder / "checkpoints" / json.loads((folder / INDEX).read_text())["names"]["last"]
    for name in ("model.safetensors", "__9_0.distcp", "stabiliser.json"):
        (last / name).write_text("{}")


UNSEEN = {"forged line": forge_line, "repeated line": repeat_last_line, "files in a checkpoint": add_to_checkpoint}
UNSEEN |= {f"planted {kind}": plant_checkpoint(kind) for kind in ("folder", "link", "broken link", "file")}


@pytest.mark.parametrize("edit", UNSEEN.values(), ids=UNSEEN)
def test_what_no_checksum_covers_changes_nothing(edit, runs, tmp_path):
    assert outcome(runs, tmp_path / "run", edit) == "equal"


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "device"])
def test_what_is_no_file_of_this_folder(kind, runs, tmp_path):
    """A link is followed; what it leads to is held by the same checksums. Nobody waits for a pipe or a device.

    Of `model` nothing is read, and what is written into a pipe there waits for its reader, as anywhere.
    """
    for number, name in enumerate(name for name in files_of(runs) if kind == "link" or not name.startswith("model/")):
        folder = tmp_path / str(number)
        shutil.copytree(runs / "run", folder)
        path = folder / name
        path.rename(tmp_path / f"{number}.aside")
        match kind:
            case "link":
                path.symlink_to(tmp_path / f"{number}.aside")
            case "pipe":
                os.mkfifo(path)
            case "folder":
                path.mkdir()
            case "device":
                path.symlink_to("/dev/zero")
        try:
            run.resume(folder, say=quiet)
        except Refusal as reason:
            assert not isinstance(reason, Unforeseen)
        else:
            assert_same_run(folder, runs / "whole")


def test_a_config_before_the_first_checkpoint(runs, tmp_path):
    def edit(folder: Path) -> None:
        for path in (folder / "checkpoints", folder / "model"):
            shutil.rmtree(path)
        (folder / "metrics.jsonl").unlink()

    def edit_both(folder: Path) -> None:
        edit(folder)
        path = folder / CONFIG
        path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))

    assert outcome(runs, tmp_path / "run", edit) == "equal"
    assert outcome(runs, tmp_path / "changed", edit_both) == "refused"


def older(folder: Path) -> None:
    """As versions without these checksums left a run."""
    document = json.loads((folder / CONFIG).read_text())
    document.pop("checksum")
    (folder / CONFIG).write_text(json.dumps(document))
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index["names"]))


def test_an_older_run_goes_on_where_it_is_said_to(runs, tmp_path):
    assert outcome(runs, tmp_path / "refused", older) == "refused"
    shutil.copytree(runs / "run", tmp_path / "run")
    older(tmp_path / "run")
    refused = locater("train", "--resume", tmp_path / "run")
    assert refused.code == 1 and "without a checksum" in refused.err and "--set verified=no" in refused.err
    assert run.resume(tmp_path / "run", stop_after=8, verified=False, say=quiet).step == 8
    run.resume(tmp_path / "run", say=quiet)  # from then on it is verified again
    assert_same_run(tmp_path / "run", runs / "whole")
    assert locater("train", "--set", "verified=no", "--out", tmp_path / "new").code == 2


def test_another_version_or_device_is_refused(runs, tmp_path, monkeypatch):
    monkeypatch.setattr("locater_lab.train.loop.describe_software", lambda device: "locater 9 and torch 9 on abacus")
    assert outcome(runs, tmp_path / "run", lambda folder: None) == "refused"
    assert run.resume(tmp_path / "run", verified=False, say=quiet).is_done


def test_data_that_moved_is_named(runs, tmp_path):
    shutil.copytree(runs / "run", tmp_path / "run")
    shutil.copy(runs / "text.txt", tmp_path / "moved.txt")
    run.resume(tmp_path / "run", data=str(tmp_path / "moved.txt"), say=quiet)
    assert_same_run(tmp_path / "run", runs / "whole")
    assert run.read_run_config(tmp_path / "run", verified=True).data.data == str((tmp_path / "moved.txt").resolve())
    shutil.copytree(runs / "run", tmp_path / "again")
    (tmp_path / "moved.txt").write_text("something else and more of it\n" * 500)
    with pytest.raises(Refusal, match="the data that this run began with"):
        run.resume(tmp_path / "again", data=str(tmp_path / "moved.txt"), say=quiet)


@pytest.mark.parametrize("writes", range(4))
def test_a_run_killed_while_it_is_given_another_end_has_one_of_the_two(writes, runs, tmp_path, monkeypatch):
    """The index admits both configs, the config is written, the index admits the new one."""
    shutil.copytree(runs / "run", tmp_path / "run")
    left = [writes]

    def write(document, path):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        original(document, path)

    original = run.write_json
    with monkeypatch.context() as patched:
        for module in ("run", "store"):
            patched.setattr(f"locater_lab.train.{module}.write_json", write)
        with pytest.raises(KeyboardInterrupt):
            run.resume(tmp_path / "run", length={"steps": 14}, say=quiet)
    ended = run.resume(tmp_path / "run", say=quiet)
    assert ended.step == ended.num_steps == (14 if writes >= 2 else 12)
