"""`watch_every` and `on_alarm` of `locater train`: what follows an alarm, and that a resumed run knows of it."""

import json

import pytest

from locater.errors import BadArguments, Refusal
from locater_lab.train.methods import read_actions
from locater_lab.train.metrics import read_metrics
from locater_lab.train.run import resume, start
from training_cases import tiny, weights, write_text

WILD = dict(learning_rate=0.5, warmup=0, schedule="constant", steps=12, watch_every=2, validate_every=6)


def watched(folder):
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "watch"]


def names(folder):
    return json.loads((folder / "checkpoints" / "index.json").read_text())["names"]


def quiet(sentence):
    pass


def test_a_healthy_run_is_watched_and_left_alone(tmp_path):
    text, said = write_text(tmp_path), []
    start(tiny(text, watch_every=5, steps=8), tmp_path / "watched", say=said.append)
    start(tiny(text, steps=8), tmp_path / "alone", say=quiet)
    rows = watched(tmp_path / "watched")
    assert [row["step"] for row in rows] == [1, 6] and not any(row["actions"] or row["notes"] for row in rows)
    assert 0 < rows[1]["attn/layer_00/entropy"] < 3 and rows[1]["attn/layer_00/update_ratio"] > 0
    ours, theirs = weights(tmp_path / "watched"), weights(tmp_path / "alone")
    assert all(ours[name].equal(tensor) for name, tensor in theirs.items())


def test_stop_ends_the_run_with_a_sentence_and_it_can_go_on(tmp_path):
    said = []
    outcome = start(tiny(write_text(tmp_path), on_alarm="stop", **WILD), tmp_path / "run", say=said.append)
    assert not outcome.is_done and 1 < outcome.step < 12
    assert any("logit explosion: decoder layer 0" in sentence and "(stop)" in sentence for sentence in said)
    assert resume(tmp_path / "run", say=said.append).step > outcome.step


def test_a_checkpoint_of_the_first_alarm_is_kept_and_qk_clip_attached(tmp_path):
    config = tiny(write_text(tmp_path), on_alarm="checkpoint,attach-qk-clip=5", **WILD)
    start(config, tmp_path / "run", say=quiet)
    first, *later = [row for row in watched(tmp_path / "run") if row["actions"]]
    assert first["actions"] == [f"checkpoint step-{first['step']:08d}", "attached QK-clip"] and not later
    assert names(tmp_path / "run")["alarm"] == f"step-{first['step']:08d}"
    last = watched(tmp_path / "run")[-1]
    assert "try QKClip" not in " ".join(last["alarms"]), "it is attached"


@pytest.mark.parametrize("stop", [4, 7])
def test_roll_backs_are_resumed_to_the_bit(tmp_path, stop):
    """Weights, and all that was looked at but updates since a report that the resumed process has not seen."""
    config = tiny(write_text(tmp_path), on_alarm="roll-back=0.01,attach-qk-clip=5,checkpoint", dropout=0.1, **WILD)
    start(config, tmp_path / "whole", say=quiet)
    start(config, tmp_path / "parts", stop_after=stop, say=quiet)
    resume(tmp_path / "parts", say=quiet)
    done = [one for row in watched(tmp_path / "whole") for one in row["actions"]]
    assert any(one.startswith("back to the weights of step 0, 0.01 times") for one in done)
    ours, theirs = weights(tmp_path / "parts"), weights(tmp_path / "whole")
    assert all(ours[name].equal(tensor) for name, tensor in theirs.items())
    rows = [[_lasting(row) for row in watched(tmp_path / name)] for name in ("whole", "parts")]
    assert rows[0] == rows[1] and names(tmp_path / "whole") == names(tmp_path / "parts")


def _lasting(row):
    return {name: value for name, value in row.items() if "update_" not in name}


def test_a_lost_step_is_gone_over_from_a_good_state(tmp_path):
    wild = {**WILD, "learning_rate": 1e18, "watch_every": 1, "clip": 0.0}
    with pytest.raises(Refusal, match="the last good state"):
        start(tiny(write_text(tmp_path), on_alarm="checkpoint", **wild), tmp_path / "lost", say=quiet)
    start(tiny(tmp_path / "text.txt", on_alarm="roll-back=1e-20", **wild), tmp_path / "saved", say=quiet)
    rows = watched(tmp_path / "saved")
    assert any(one.startswith("back to") for row in rows for one in row["actions"])
    assert rows[-1]["step"] == 12 and not rows[-1]["actions"]


def test_three_roll_backs_and_no_more(tmp_path):
    config = tiny(write_text(tmp_path), on_alarm="roll-back=1", **WILD | {"steps": 30, "watch_every": 1})
    outcome = start(config, tmp_path / "run", say=quiet)
    done = [one for row in watched(tmp_path / "run") for one in row["actions"]]
    assert [one.startswith("back to") for one in done] == [True] * 3 + [False] and "stop after 3" in done[-1]
    assert not outcome.is_done


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(on_alarm="explode", watch_every=1), "on_alarm expects some of stop, checkpoint, roll-back"),
        (dict(on_alarm="stop"), "set watch_every too"),
        (dict(on_alarm="stop=3", watch_every=1), "got 'stop=3'"),
        (dict(on_alarm="roll-back=2", watch_every=1), "a factor in"),
        (dict(on_alarm="roll-back=x", watch_every=1), "expects a number, got 'x'"),
        (dict(on_alarm="attach-qk-clip=-1", watch_every=1), "a threshold above 0"),
        (dict(on_alarm="attach-qk-clip", watch_every=1, compile=True), "leave out compile"),
        (dict(watch_every=-1), "steps between looks of at least 0"),
    ],
)
def test_what_cannot_be_done_on_an_alarm(tmp_path, given, message):
    with pytest.raises((BadArguments, Refusal), match=message):
        tiny(tmp_path, **given)


def test_actions_read_as_written():
    assert read_actions(" stop , roll-back=0.1") == {"stop": None, "roll-back": 0.1}
    assert read_actions("") == {}
