"""`theory.profile(head)`: the head's own scale, norms and positions, against the functions of weights."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from locater import Head, Projection, theory
from locater.errors import Refusal
from locater.positions import Alibi, Rotary
from locater.projections import Norm
from locater.spectra import moments
from locater.theory.random_walk import Turns


@pytest.fixture
def head():
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2, 6, 16, generator=generator, dtype=torch.float64) / 3
    gain = torch.rand(16, generator=generator, dtype=torch.float64) + 0.5
    query, key = (Projection(weight, input_norm=Norm("rms", gain)) for weight in weights)
    return Head(0, 0, query, key, scale=0.3)


def folded(head):
    gain = head.query.input_norm.gain
    return head.query.weight * gain, head.key.weight * gain


@pytest.mark.parametrize("method, module", [("closed", theory.closed_form), ("exact", theory.exact)])
def test_the_gain_is_folded_and_the_scale_is_the_heads(head, method, module):
    expected = module.profile(*folded(head), length=20, temperature=1 / 0.3)
    torch.testing.assert_close(theory.profile(head, length=20, method=method), expected)


def test_simulated_walks_agree_with_the_exact_law(head):
    walks = theory.profile(head, length=12, method="monte-carlo", num_walks=4000)
    torch.testing.assert_close(walks, theory.profile(head, length=12, method="exact"), atol=0.04, rtol=0)


def test_positions_enter(head):
    rotary = Rotary(100.0, 6)
    turning = dict(turns=Turns(rotary.pairs, rotary.frequencies(20)), temperature=1 / 0.3)
    expected = theory.closed_form.rotary_profile(*folded(head), length=20, **turning)
    turned = replace(head, rotary=rotary)
    torch.testing.assert_close(theory.profile(turned, length=20), expected)
    walks = theory.profile(turned, length=20, method="monte-carlo", num_walks=2000)
    assert (walks - expected).abs().max() < 0.15
    biased = replace(head, position_bias=Alibi(3.0))
    bias = -3.0 * torch.arange(19, -1, -1, dtype=torch.float64)
    expected = theory.closed_form.from_moments(moments(*folded(head)), length=20, temperature=1 / 0.3, bias=bias)
    torch.testing.assert_close(theory.profile(biased, length=20), expected)


def test_what_a_method_cannot_do_is_refused(head):
    with pytest.raises(Refusal, match="among closed, monte-carlo for this head's positions, got 'exact'"):
        theory.profile(replace(head, rotary=Rotary(100.0, 6)), length=8, method="exact")
    with pytest.raises(Refusal, match="among closed for"):
        theory.profile(replace(head, position_bias=Alibi(3.0)), length=8, method="exact")


def test_the_words_need_no_torch():
    program = "import sys, locater.quantities, locater.report.figures; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", theory.__all__)
def test_every_name_of_the_folder_can_be_reached(name):
    assert getattr(theory, name) is not None
