"""Shared, computed, copied and zero weights; passes that are recomputed or transformed: acted on, or refused."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from locater import Live, scan
from locater.errors import Refusal
from locater.models.live import open_live
from locater.monitor import AttentionMonitor
from locater.stabilisers import EntropyBonus, QKClip, SigmaReparam, SoftCap, ZLoss

D, HEADS = 16, 4
X = torch.randn(2, 6, D, generator=torch.Generator().manual_seed(0)).double()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(D, D).double() for _ in range(3))

    def forward(self, x):
        q, k, v = (one(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class Net(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.reentrant = nn.ModuleList([Attention(), Attention()]), reentrant

    def forward(self, x):
        for layer in self.layers:
            x = x + (layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant))
        return x


def logits(layer, x):
    q, k = (one(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (layer.q_proj, layer.k_proj))
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return (q @ k.mT / 2).masked_fill(~causal, -torch.inf)


# ------------------------------------------------------------------------------------------------- recomputed passes
@pytest.mark.parametrize("kind", [ZLoss, EntropyBonus])
def test_passes_that_run_without_gradients_and_again_in_backward_are_refused(kind):
    model = Net(reentrant=True)
    stabiliser = kind(model, weight=1.0)
    x = X.clone().requires_grad_()
    loss = model(x).square().sum() + stabiliser.penalty()
    with pytest.raises(Refusal, match="use_reentrant=False"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_spectral_norms_of_a_recomputed_pass_are_those_of_the_pass(reentrant):
    found = []
    for how in (None, reentrant):
        model = Net(how)
        torch.manual_seed(1)
        SigmaReparam(model)
        model(X.clone().requires_grad_()).square().sum().backward()
        found.append([one.grad for one in model.parameters()])
    assert all(torch.allclose(one, other, rtol=1e-9) for one, other in zip(*found, strict=True))


def test_passes_under_transformations_are_told_or_refused():
    model, weights = Net(), dict(Net().named_parameters())

    def loss(weights, x):
        return functional_call(model, weights, (x[None],)).square().sum()

    expected = vmap(grad(loss), (None, 0))(weights, X)
    with AttentionMonitor(model, every=1) as monitor:
        found = vmap(grad(loss), (None, 0))(weights, X)
        assert "torch.func" in " ".join(monitor.report().notes)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    stabiliser = QKClip(model, sample=X)
    with pytest.raises(Refusal, match=r"outside of torch\.vmap"):
        vmap(grad(loss), (None, 0))(weights, X)
    stabiliser.detach()


# --------------------------------------------------------------------------------------------------- computed weights
@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, lambda one: SigmaReparam(one)])
def test_to_look_turns_no_vectors(norm):
    model = Net()
    norm(model.layers[0].q_proj)
    model.train()
    before = {name: one.clone() for name, one in model.named_buffers()}
    scan(Live(model, sample=X))
    ZLoss(model, weight=1.0, sample=X).detach()
    AttentionMonitor(model, every=1).report()
    assert before and all(torch.equal(one, before[name]) for name, one in model.named_buffers())


class Twice(nn.Module):
    def forward(self, bias):
        return 2 * bias


def test_clip_refuses_a_computed_bias():
    model = Net()
    parametrize.register_parametrization(model.layers[0].q_proj, "bias", Twice())
    with pytest.raises(Refusal, match="plain parameters to clip"):
        QKClip(model, sample=X)


def test_weights_that_hooks_compute_are_named():
    model = Net()
    prune.random_unstructured(model.layers[0].q_proj, "weight", 0.5)
    heads = [(f"layers.{n}.q_proj", f"layers.{n}.k_proj", HEADS, HEADS) for n in range(2)]
    with pytest.raises(Refusal, match=r"a parameter `layers\.0\.q_proj\.weight`.*a hook computes"):
        ZLoss(model, weight=1.0, heads=heads)
    with pytest.warns(UserWarning, match=r"left out: .*layers\.0"):
        ZLoss(model, weight=1.0, sample=X)


# ----------------------------------------------------------------------------------------------------- shared weights
@pytest.mark.parametrize("shared", ["q_proj", "k_proj"])
def test_a_projection_of_two_layers_is_held_in_both(shared):
    model = Net()
    setattr(model.layers[1], shared, getattr(model.layers[0], shared))
    SoftCap(model, cap=0.3, sample=X)
    x = X
    for layer in model.layers:
        v = layer.v_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        capped = 0.3 * torch.tanh(logits(layer, x) / 0.3)
        p = capped.masked_fill(logits(layer, x) == -torch.inf, -torch.inf).softmax(-1)
        x = x + (p @ v).transpose(1, 2).flatten(-2)
    assert torch.allclose(model(X), x)


# ---------------------------------------------------------------------------------------------- heads that look alike
@pytest.mark.parametrize("start", ["zero", "copied"])
@pytest.mark.parametrize("side", ["q_proj", "k_proj"])
def test_heads_alike_have_rows_of_their_own(side, start):
    model = Net()
    with torch.no_grad():
        for one in getattr(model.layers[0], side).parameters():
            rows = one.view(HEADS, -1)
            rows[1:3] = 0.0 if start == "zero" else rows[:1]
    site = open_live(model, sample=X).sites[0]
    assert site.row.fused is None and site.num_heads == HEADS and site.shape.num_key_heads == HEADS


@pytest.mark.parametrize("side", ["q_proj", "k_proj"])
def test_a_projection_of_zeros_tells_nothing_of_its_heads(side):
    model = Net()
    for one in getattr(model.layers[0], side).parameters():
        nn.init.zeros_(one)
    assert "not all zero" in str(open_live(model, sample=X).sites[0].reason)
