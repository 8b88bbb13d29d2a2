"""Loops as people write them: optimisers made anew, full disks, cells run again, weights frozen or broken before."""

import copy
import gc
import json
import math
import resource
from contextlib import contextmanager

import pytest
import torch
from test_actions_hold import Run
from test_monitor import llama
from torch.optim import SGD

import hand_written
from locater.models.live.rate_factor import current_factor
from locater.monitor import Attach, AttentionMonitor, Checkpoint, JsonLines, RollBack, Stop
from locater.stabilisers import LocAteR, QKClip


def test_an_optimiser_that_was_made_anew_is_told_before_any_alarm():
    """What RollBack and a decoupled LocAteR were given would scale and step beside the one that trains."""
    run = Run([RollBack(0.5), Attach(QKClip, threshold=20.0)])
    run.run(1)
    run.optimizers[:] = [SGD(run.model.parameters(), lr=1e-3)]
    with pytest.warns(UserWarning, match=r"RollBack does not hold: optimiser 0 \(\w+\) has not stepped for 10 steps"):
        run.run(12)
    model = hand_written.decoder(hand_written.Fused)
    old = SGD(model.parameters(), lr=1e-3)
    decoupled = LocAteR(model, strength=1e-3, optimizer=old, sample=hand_written.TOKENS)
    with pytest.warns(UserWarning, match="optimiser 0 .SGD. has not stepped for 10 steps"):
        for _ in range(11):
            decoupled.step()
    decoupled.detach()
    assert not old._optimizer_step_pre_hooks


def test_no_state_is_put_back_that_was_never_good():
    run = Run(RollBack(0.5, then=Stop()))
    with torch.no_grad():
        next(run.model.parameters()).fill_(torch.nan)
    run.run(2)
    assert "the weights were not finite at the start" in run.lines()[0] and run.monitor.should_stop
    assert not any("rolled back to" in line for line in run.lines())


def test_several_that_wait_for_the_first_call_each_get_it():
    """An action's trial runs the model within that call, where the next one's hook would be found and lost."""
    model = hand_written.decoder(hand_written.Fused).train()
    optimizer = SGD(model.parameters(), lr=1e-3)
    waiting = LocAteR(model, strength=1e-3, optimizer=optimizer)
    monitors = [AttentionMonitor(model, every=1, on_alarm=Attach(QKClip, threshold=9.0)) for _ in range(2)]
    model(hand_written.TOKENS).logsumexp(-1).sum().backward()
    optimizer.step()
    waiting.step()
    assert all(monitor.step().training for monitor in monitors)


@contextmanager
def files_of(size):
    """No file may grow beyond that: as on a full disk, a write is cut off and fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_no_run_and_leaves_no_half_of_a_file(tmp_path, caplog):
    path = tmp_path / "alarm.pt"
    run = Run([Checkpoint(path), RollBack(0.5)])
    run.monitor.sinks = (JsonLines(tmp_path / "log.jsonl"),)
    with files_of(500), pytest.warns(UserWarning, match="Checkpoint could not act"):
        run.run(4, explode_at=2)
    assert list(tmp_path.iterdir()) == [tmp_path / "log.jsonl"]
    assert sum("JsonLines could not write" in one.message for one in caplog.records) == 1
    run.run(2, explode_at=0)
    assert torch.load(path, weights_only=True)["model"]
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [4, 5]


def test_a_monitor_that_nobody_holds_leaves_model_and_optimiser():
    """A cell of a notebook that is run again makes another, whose factor would come on top of the first one's."""
    run = Run(RollBack(0.5)).run(3, explode_at=1)
    model, optimizer = run.model, run.optimizers[0]
    assert current_factor(optimizer) == 0.5
    del run
    gc.collect()
    assert current_factor(optimizer) == 1 and not model._forward_pre_hooks and not optimizer._optimizer_step_pre_hooks


def test_what_is_frozen_since_is_not_clipped():
    model = hand_written.decoder(hand_written.Fused)
    clip = QKClip(model, threshold=1e-3, sample=hand_written.TOKENS)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    clip.largest = {pair.name: torch.ones(math.prod(pair.shape)) for pair in clip.pairs}
    clip.step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_text_of_one_word_repeated_is_no_collapse():
    """Without positions of their own, its tokens are alike from the first layer on: samples of a young model are so."""
    model = llama().eval()
    with AttentionMonitor(model, every=1) as monitor:
        model(torch.full((2, 24), 7))
    assert not monitor.report().alarms
