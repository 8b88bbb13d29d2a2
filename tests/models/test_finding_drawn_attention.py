"""Heads of attention drawn at random: found, and proven by the model's own logits, or refused with the step."""

import collections

import pytest
import torch

from drawn_attention import drawn
from locater.models import read_heads
from locater.models.live import open_live


def is_known(draw):
    """Whether a `Head` can do what was drawn: no centred norm behind a rotation, no key heads out of order."""
    turned_first = draw.norm != "none" and draw.rotary != "none" and draw.order == "after"
    tiled = draw.keys == "tile" and 1 < draw.key_heads < draw.heads
    return not tiled and not (turned_first and draw.norm.startswith("layer"))


def apart(model, layers):
    """The largest difference of a head's logits from the model's, against the largest logit of that head."""
    largest = 0.0
    for layer, block in zip(layers, model.blocks, strict=True):
        given, kept = block.mixer.given.double(), block.mixer.kept
        assert len(layer.heads) == block.mixer.draw.heads, layer.refused
        for head in layer.heads:
            expected = kept[:, head.index]
            seen = expected.isfinite()
            error = (head.logits(given, given).detach() - expected)[seen].abs().max() / expected[seen].abs().max()
            largest = max(largest, float(error))
    return largest


@torch.no_grad()
def check(seed):
    model, draw, tokens = drawn(seed)
    found = open_live(model, sample=tokens).sites
    model(tokens)
    if not is_known(draw):
        assert all("mixer: expected " in read_heads(site).refused[0] for site in found), str(draw)
        return "refused"
    assert apart(model, [read_heads(site) for site in found]) < 2e-5, str(draw)
    for parameter in model.parameters():  # a step of training: heads are views of the parameters that really act
        parameter.add_(0.1 * torch.randn_like(parameter) * parameter.std().nan_to_num(1.0).clamp(min=0.1))
    model(tokens)
    assert apart(model, [read_heads(site) for site in found]) < 5e-5, f"after a step: {draw}"
    return "found"


@pytest.mark.parametrize("seed", range(24))
def test_heads_of_drawn_attention(seed):
    check(seed)


@pytest.mark.slow
def test_heads_of_hundreds_of_drawn_attentions():
    counts = collections.Counter(check(seed) for seed in range(24, 424))
    assert counts["found"] > 250
