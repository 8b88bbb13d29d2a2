"""Stabilisers of a custom model find its heads in its first call: as with `sample=`, to the bit, never silently not."""

import copy

import pytest
import torch

import hand_written
from hand_written import TOKENS
from locater.errors import Refusal
from locater.stabilisers import EntropyBonus, LocAteR, QKClip, QKDecay, QKNorm, SigmaReparam, SoftCap, Stabiliser, ZLoss

MAKES = {
    "LocAteR": lambda model, optimizer, **more: LocAteR(model, strength="auto", **more),
    "LocAteR decoupled": lambda model, optimizer, **more: LocAteR(model, strength="auto", optimizer=optimizer, **more),
    "QKClip": lambda model, optimizer, **more: QKClip(model, threshold=0.5, **more),
    "QKNorm": lambda model, optimizer, **more: QKNorm(model, **more),
    "SoftCap": lambda model, optimizer, **more: SoftCap(model, cap=0.5, **more),
    "QKDecay": lambda model, optimizer, **more: QKDecay(model, decay=0.5, optimizer=optimizer, **more),
    "ZLoss": lambda model, optimizer, **more: ZLoss(model, weight=0.1, **more),
    "EntropyBonus": lambda model, optimizer, **more: EntropyBonus(model, weight=0.1, **more),
    "SigmaReparam": lambda model, optimizer, **more: SigmaReparam(model, **more),
}


def trained(make, num_steps=3, state=None, **more):
    """Weights after a few steps, the stabiliser taken off again, and its state."""
    torch.manual_seed(0)
    model = hand_written.decoder(hand_written.Fused).train()
    before = dict(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with make(model, optimizer, **more) as stabiliser:
        if state is not None:
            stabiliser.load_state_dict(copy.deepcopy(state))
        for _ in range(num_steps):
            loss = model(TOKENS).square().mean()
            (loss + stabiliser.penalty()).backward()
            optimizer.step()
            optimizer.zero_grad()
            stabiliser.step()
        kept = stabiliser.state_dict()
    assert model.state_dict().keys() == before.keys()
    assert not model._forward_pre_hooks and not any("forward" in vars(module) for module in model.modules())
    return [one.detach().clone() for one in model.parameters()], kept


@pytest.mark.parametrize("name", MAKES)
def test_without_a_sample_it_is_as_with_one(name):
    (plain, _), (given, state), (found, other) = (
        trained(lambda model, optimizer: Stabiliser()),
        trained(MAKES[name], sample=TOKENS),
        trained(MAKES[name]),
    )
    assert all(torch.equal(one, two) for one, two in zip(given, found, strict=True)) and str(state) == str(other)
    assert any(not torch.equal(one, two) for one, two in zip(plain, found, strict=True)), "it acts"
    resumed, _ = trained(MAKES[name], state=state)
    expected, _ = trained(MAKES[name], state=state, sample=TOKENS)
    assert all(torch.equal(one, two) for one, two in zip(resumed, expected, strict=True))


def test_before_the_first_call_nothing_is_done_in_silence():
    model = hand_written.decoder(hand_written.Fused).train()
    locater, norm = LocAteR(model, strength=1e-3), QKNorm(model)
    for act in (locater.penalty, norm.parameters):
        with pytest.raises(Refusal, match="no call so far; call the model itself, model"):
            act()
    assert locater.state_dict() == {} and norm.metrics() == {}
    twin = copy.deepcopy(model)
    twin(TOKENS)
    assert locater.waiting is not None, "a copy's call is not the model's"
    for one in (locater, norm):
        one.detach()
    assert not model._forward_pre_hooks


def test_a_model_without_attention_is_refused_at_its_first_call():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    QKClip(model)
    with pytest.raises(Refusal, match="attention in one pass"):
        model(torch.ones(2, 4))
