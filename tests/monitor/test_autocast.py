"""Under autocast: the same heads are read as without it, and what differs by half precision alone is no remark."""

import inspect

import pytest
import torch
from test_monitor import llama
from torch import nn

import hand_written
from locater.monitor import AttentionMonitor

WRITTEN = (hand_written.Separate, hand_written.Fused)
KINDS = {  # all that call a kernel: what is written out in an unknown model is refused
    name: one
    for name, one in vars(hand_written).items()
    if inspect.isclass(one) and issubclass(one, WRITTEN) and not issubclass(one, hand_written.WrittenOut)
}
TOKENS = torch.randint(0, 40, (2, 24), generator=torch.Generator().manual_seed(3))


def report_of(model, is_cast):
    with AttentionMonitor(model, every=1) as monitor:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            model(TOKENS)
        return monitor.step()


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("name", KINDS)
def test_heads_that_are_read_in_half_precision_are_those_of_the_model(name, norm):
    """Several norms fit what half precision leaves of their outputs; the wrong one moved the numbers by 5 %."""
    model = hand_written.decoder(KINDS[name], norm).train()
    plain, cast = report_of(model, False), report_of(model, True)
    for one, other in zip(plain.training, cast.training, strict=True):
        for number in ("eta", "sigma_1"):
            if number in other.weights:  # where they are not found a note says so
                assert other.weights[number] == pytest.approx(one.weights[number], rel=1e-6), number


def test_rounding_is_no_remark_on_a_known_model():
    report = report_of(llama().train(), True)
    assert report.notes == () and all(bound > 0 for layer in report.training for bound in layer.weights["logit_bound"])
