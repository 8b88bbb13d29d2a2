"""kill -9 at random moments of a run that saves after every step: resumed, it ends as if nothing had happened."""

import multiprocessing
import os
import random
import time

import pytest
import torch

from training_cases import STATEFUL, assert_same_run, tiny, write_text

CHANGED = dict(steps=30, save_every=1, validate_every=7, **STATEFUL)


def work(text, folder, cache) -> None:
    """A process of its own: starts the run, or resumes it."""
    os.environ["LOCATER_CACHE"] = str(cache)
    torch.set_num_threads(1)
    from locater_lab.train import run

    if (folder / "config.json").exists():
        run.resume(folder, say=lambda sentence: None)
    else:
        run.start(tiny(text, **CHANGED), folder, say=lambda sentence: None)


def process(*arguments):
    """From a server that has imported everything already, so that a run takes a second."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["locater_lab.train.run"])
    started = context.Process(target=work, args=arguments)
    started.start()
    return started


def wait_for_config(running, folder) -> None:
    while not (folder / "config.json").exists():
        assert running.is_alive(), "the run died before it began"
        time.sleep(0.001)


def kill_and_resume(moment, text, folder, cache) -> bool:
    """Whether the run was still going when it was killed; resumed or not, it has ended afterwards."""
    running = process(text, folder, cache)
    wait_for_config(running, folder)
    time.sleep(moment)
    running.kill()
    running.join()
    assert running.exitcode in (0, -9)
    last = process(text, folder, cache)
    last.join()
    assert last.exitcode == 0
    return running.exitcode == -9


def check(tmp_path, *, num_runs: int, seed: int) -> None:
    text, cache = write_text(tmp_path), tmp_path / "cache"
    process(text, tmp_path / "first", cache).join()  # fills the cache of tokens
    whole = process(text, tmp_path / "whole", cache)
    wait_for_config(whole, tmp_path / "whole")
    begun = time.monotonic()
    whole.join()
    duration = time.monotonic() - begun
    assert whole.exitcode == 0
    draw, killed = random.Random(seed), 0
    for number in range(num_runs):
        folder = tmp_path / f"killed-{number}"
        killed += kill_and_resume(draw.uniform(0, 0.9 * duration), text, folder, cache)
        assert_same_run(folder, tmp_path / "whole")
    assert killed >= 0.6 * num_runs, "too many runs ended before their kill"


def test_killed_at_three_moments(tmp_path):
    check(tmp_path, num_runs=3, seed=0)


@pytest.mark.slow
def test_killed_at_twenty_moments(tmp_path):
    check(tmp_path, num_runs=20, seed=100)
