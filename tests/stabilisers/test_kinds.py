"""Every stabiliser on every kind of model: LocAteR's penalty is the dense sum, all act and leave no trace."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hand_written as own
from locater import Live, heads
from locater.models.registry import is_in_tables
from locater.stabilisers import EntropyBonus, LocAteR, QKClip, QKDecay, QKNorm, SigmaReparam, SoftCap, ZLoss
from locater_lab.rivals import SpectralInitialisation, SpectralNorm
from stabiliser_models import ernie, gpt2, llama

TOKENS = own.TOKENS


def hand_written(attention):
    return lambda: own.decoder(attention)


KINDS = {
    "fused": (hand_written(own.Fused), {"sample": TOKENS}),
    "separate": (hand_written(own.Separate), {"sample": TOKENS}),
    "grouped": (hand_written(own.Grouped), {"sample": TOKENS}),
    "found, rotary": (hand_written(own.Rotary), {"sample": TOKENS}),
    "proven": (ernie, {}),
    "table": (llama, {}),
    "table, fused": (gpt2, {}),
}
STABILISERS = {
    "locater": lambda model, optimizer, how: LocAteR(model, strength=1e-2, optimizer=optimizer, **how),
    "qk-decay": lambda model, optimizer, how: QKDecay(model, decay=1.0, optimizer=optimizer, **how),
    "qk-clip": lambda model, optimizer, how: QKClip(model, threshold=1e-3, **how),
    "qk-norm": lambda model, optimizer, how: QKNorm(model, **how),
    "soft-cap": lambda model, optimizer, how: SoftCap(model, cap=0.01, **how),
    "z-loss": lambda model, optimizer, how: ZLoss(model, weight=1.0, **how),
    "entropy-bonus": lambda model, optimizer, how: EntropyBonus(model, weight=1.0, **how),
    "sigma-reparam": lambda model, optimizer, how: SigmaReparam(model),
    "spectral-norm": lambda model, optimizer, how: SpectralNorm(model, **how),
}


def grown(kind: str, *, adapted: bool = False):
    torch.manual_seed(0)
    model, how = KINDS[kind][0](), KINDS[kind][1]
    if adapted:
        peft = pytest.importorskip("peft")
        names = {name.rpartition(".")[2] for name, one in model.named_modules() if name}
        targets = sorted(names & {"q_proj", "k_proj", "qkv", "c_attn"})
        options = dict(r=2, target_modules=targets, init_lora_weights=False, fan_in_fan_out="c_attn" in names)
        model = peft.get_peft_model(model, peft.LoraConfig(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model, how


def logits(model):
    found = model(TOKENS % 40)
    return getattr(found, "logits", found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "peft"])
def test_the_penalty_is_the_dense_sum(kind, adapted):
    model, how = grown(kind, adapted=adapted)
    total = 0.0
    with torch.no_grad():
        for head in heads(Live(model, **how)):
            full = head.key.weight.double().mT @ head.query.weight.double()
            total += float((full * full.mT).sum() + 2 * full.square().sum()) / 3
    found = float(LocAteR(model, strength=1.0, **how).penalty().detach())
    assert found == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STABILISERS)
def test_it_acts_and_leaves_no_trace(kind, name):
    model, how = grown(kind)
    before = logits(model).detach()
    stored = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stabiliser = STABILISERS[name](model, optimizer, how)
    output = logits(model)
    penalty = stabiliser.penalty()
    stabiliser.step()
    moved = any(not torch.equal(stored[key], value) for key, value in model.state_dict().items() if key in stored)
    changed = not torch.allclose(output.detach(), before, atol=1e-6)
    assert moved or changed or float(penalty.detach()) != 0
    for _ in range(2):
        stabiliser.detach()
    assert model.state_dict().keys() == stored.keys()
    model.load_state_dict(stored)
    assert torch.equal(logits(model), before)


WRITING = {
    "clip": lambda model, how: QKClip(model, threshold=1.0, **how),
    "decay": lambda model, how: QKDecay(model, decay=1.0, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), **how),
    "initialise": lambda model, how: SpectralInitialisation(model, xi=0.5, eta=0.3, **how),
}


@pytest.mark.parametrize("what", WRITING)
def test_what_writes_into_weights_refuses_computed_ones(what):
    """It would write into a copy, and nothing would come of it."""
    model, how = grown("fused", adapted=True)
    with pytest.raises(ValueError, match=f"plain parameters to {what}, got computed weights in"):
        WRITING[what](model, how)
    QKClip(model, threshold=1.0, log_only=True, **how).detach()


@pytest.mark.slow
def test_slots_hold_in_compiled_models():
    """In a process of its own: the compiler cannot look through the checks of shapes that tests put on."""
    script = Path(__file__).parents[1] / "compiled_slots.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_proven_kind_is_in_no_table():
    assert not is_in_tables(KINDS["proven"][0]().config.model_type)
