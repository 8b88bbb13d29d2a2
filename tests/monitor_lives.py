"""Many lives of a monitor, and what they leave: `python monitor_lives.py NUM` prints it as JSON.

A program of its own for the long run: without the tests' checks of shapes a life takes a tenth of the time, and the
memory is that of nothing else.
"""

import copy
import gc
import io
import json
import resource
import sys
import tracemalloc
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from locater.monitor import AttentionMonitor, Scope

TOKENS = torch.randint(0, 50, (3, 24), generator=torch.Generator().manual_seed(1))
WARM, TRACED = 3, 20  # the first fill caches that are there for good


def small_model():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=64)).eval()


def life(model, tokens):
    """All that happens to a watched model: two monitors, a step, copying, saving, generating, failing."""
    first = AttentionMonitor(model, every=1).attach()
    second = AttentionMonitor(model, every=1, scope=Scope(per_head=True)).attach()
    model(tokens, labels=tokens).loss.backward()
    model.zero_grad()
    reports = first.step(), second.step()
    assert len(reports[0].evaluation) == len(reports[1].evaluation) == 2
    copy.deepcopy(model)
    torch.save(model.state_dict(), io.BytesIO())
    torch.save(model, io.BytesIO())
    with torch.no_grad():
        model.generate(tokens[:1, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
    try:
        model(tokens + 10_000)
    except IndexError:
        pass
    else:
        raise AssertionError("ids beyond the vocabulary did not fail")
    second.detach()
    model(tokens)
    first.report()
    first.detach()


def resident_bytes():
    status = Path("/proc/self/statm")  # Linux has it; elsewhere objects and traced memory must do
    return int(status.read_text().split()[1]) * resource.getpagesize() if status.exists() else 0


def held():
    gc.collect()
    objects = gc.get_objects()
    # By type: `isinstance` would ask modules that load themselves at the first question.
    tensors = sum(issubclass(type(one), torch.Tensor) for one in objects)
    return {"objects": len(objects), "tensors": tensors, "resident": resident_bytes()}


def left_behind(model, num_lives):
    """What is held more after so many lives than before: objects, tensors, bytes."""
    for _ in range(WARM):
        life(model, TOKENS)
    before = held()
    for number in range(num_lives):
        life(model, TOKENS)
        if number % 100 == 0:
            gc.collect()  # what waits for the collector is no leak, but scatters over the heap
    left = {name: now - before[name] for name, now in held().items()}
    return left | {"traced": traced(model) if num_lives > TRACED else 0}


def traced(model):
    """Bytes that a few more lives leave, by Python's own account, which makes them three times slower."""
    tracemalloc.start()
    life(model, TOKENS)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(TRACED):
        life(model, TOKENS)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return after - before


if __name__ == "__main__":
    print(json.dumps(left_behind(small_model(), int(sys.argv[1]))))
