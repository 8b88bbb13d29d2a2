"""A monitor's log of last night in five sentences."""

import html
import json

import torch

import hand_written
from command import locater
from locater.monitor import AttentionMonitor, JsonLines, RollBack
from locater.report.stories import tell


def night(path, on_alarm=None, explode_at=2, num_steps=5):
    model = hand_written.decoder(hand_written.Fused).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with AttentionMonitor(model, every=1, optimizer=optimizer, on_alarm=on_alarm, sinks=[JsonLines(path)]) as monitor:
        for step in range(num_steps):
            if step == explode_at:
                with torch.no_grad():
                    next(model.stack[1].mixer.parameters()).mul_(1e3)
            model(hand_written.TOKENS).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_five_sentences_of_a_night_that_was_saved(tmp_path):
    story = tell(night(tmp_path / "log.jsonl", RollBack(0.5)))
    assert len(story) == 5 and story[0] == "5 reports over steps 0 to 4, 1 with a serious alarm."
    assert story[1].startswith("It began at step 2: logit explosion in decoder layer 1, largest ")
    assert story[2].startswith("Most often in 1.0 (1), 1.1 (1), 1.2 (1)")
    assert (
        story[3] == "Tried: step 2: rolled back to the state after step 0 with 0.5 times the scheduled learning rate."
    )
    assert story[4].startswith(
        "What was tried helped: 0 of 2 reports after step 2 have a serious alarm, and the largest logit went from "
    )
    result = locater("report", tmp_path / "log.jsonl", "--out", tmp_path / "page.html")
    shown = " ".join((result.out + result.err).split())
    assert result.code == 0 and all(sentence in shown for sentence in story)
    page = " ".join(html.unescape((tmp_path / "page.html").read_text(encoding="utf-8")).split())
    assert f'<p class="verdict">{story[0]} {story[-1]}</p>' in page
    assert all(sentence in page for sentence in story)
    assert page.count("Note: step 2: rolled back") == 0 and "Try QKNorm" not in page  # told, and tried


def test_nights_in_which_nothing_was_tried_or_nothing_happened(tmp_path):
    story = tell(night(tmp_path / "wild.jsonl"))
    assert story[3] == "Nothing was tried." and story[4].startswith("It goes on to the last report.")
    story = tell(night(tmp_path / "calm.jsonl", explode_at=None))
    assert story[0] == "5 reports over steps 0 to 4, none with a serious alarm." and len(story) == 2
    assert tell([]) == []


def test_a_night_that_was_killed_within_a_line_and_taken_up_from_a_checkpoint(tmp_path):
    """The torn line is taken off, and of steps that were run again the last reports stand."""
    path = tmp_path / "log.jsonl"
    night(path, explode_at=1)
    path.write_bytes(path.read_bytes()[:-100])
    reports = night_again(path)
    assert [report["step"] for report in reports] == [0, 1, 2, 3, 2, 3, 4]
    story = tell(reports)
    assert story[0] == "5 reports over steps 0 to 4 (2 of steps that were run again left out), 1 with a serious alarm."
    assert story[4].startswith("It was gone by the last report.")
    assert locater("report", path, "--out", tmp_path / "page.html").code == 0


def night_again(path):
    model = hand_written.decoder(hand_written.Fused).train()
    with AttentionMonitor(model, every=1, sinks=[JsonLines(path)]) as monitor:
        monitor.num_steps = 2
        for _ in range(3):
            model(hand_written.TOKENS).square().mean().backward()
            monitor.step()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_helped_for_a_time_and_then_stopped_the_run_is_told(tmp_path):
    calm, wild = [json.loads(json.dumps(one)) for one in night(tmp_path / "log.jsonl")[1:3]]

    def report(step, of, *actions):
        return of | {"step": step, "actions": list(actions)}

    begun = [report(0, calm), report(1, wild, "step 1: rolled back to the state after step 0, because of x; 0.5 times")]
    story = tell([*begun, report(2, calm), report(3, wild, "step 3: stopped, because of x")])
    assert story[4].startswith("What was tried helped for a time: 1 of 2 reports after step 1")
    assert story[4].endswith(" The run was stopped at step 3.")
    assert tell([*begun, report(2, wild), report(3, calm)])[4].startswith("What was tried helped in the end: 1 of 2")
