"""`strength="auto"`: the share that it states, found in any loop, kept over a stop."""

import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from locater.stabilisers import Auto, LocAteR
from locater.stabilisers.strength import SHARE, STEPS

pytestmark = pytest.mark.quick

TOKENS = torch.arange(64).reshape(4, 16) * 7 % 50
RATIO = SHARE / (1 - SHARE)


def make(**changed) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = dict(n_layer=2, n_head=4, n_embd=32, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(
        GPT2Config(**sizes | changed, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.2)
    )


def loss_of(model) -> torch.Tensor:
    return model(input_ids=TOKENS, labels=TOKENS).loss


@pytest.mark.parametrize("strength", ["auto", 1e-2])
def test_autocast_around_attaching_and_stepping_changes_nothing(strength):
    ends = []
    for enabled in (False, True):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            locater = LocAteR(model, strength=strength, optimizer=optimizer)
        for _ in range(STEPS + 2):
            optimizer.zero_grad()
            loss_of(model).backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                optimizer.step()
                locater.step()
        ends.append(model.transformer.h[0].attn.c_attn.weight.detach())
    assert torch.equal(*ends)


def wanted(model) -> float:
    """RATIO times the median over heads of ‖∇loss‖/‖∇η²‖, by autograd on the weights themselves."""
    weights = [block.attn.c_attn.weight for block in model.transformer.h]
    by_loss = torch.autograd.grad(loss_of(model), weights)
    total = torch.zeros(())
    for weight in weights:
        query, key, _ = weight.mT.unflatten(0, (3, 4, 8)).unbind(0)
        full = key.mT @ query
        total = total + ((full * full.mT).sum() + 2 * full.square().sum()) / 3
    by_scale = torch.autograd.grad(total, weights)
    norms = [
        torch.stack([by.mT.unflatten(0, (3, 4, 8))[:2].square().sum((0, 2, 3)) for by in gradients])
        for gradients in (by_loss, by_scale)
    ]
    return RATIO * math.sqrt(float((norms[0] / norms[1]).flatten().median()))


@pytest.mark.parametrize("form", ["loss", "decoupled"])
def test_the_first_step_gives_the_stated_share(form):
    """Of the weights before it, however far it goes."""
    model = make()
    expected = wanted(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    locater = LocAteR(model, strength="auto", optimizer=optimizer if form == "decoupled" else None)
    (loss_of(model) + locater.penalty()).backward()
    optimizer.step()
    optimizer.zero_grad()
    locater.step()
    assert locater.strength == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", ["scaled", "parts", "clipped"])
def test_what_the_loop_does_to_gradients_does_not_matter(kind):
    """A loss scaler, accumulation and clipping; the penalty's own part is taken out from the second step on."""
    model = make()
    expected = wanted(model)
    locater = LocAteR(model, strength="auto")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(STEPS + 1):
        for part in range(2 if kind == "parts" else 1):
            loss = loss_of(model) / (2 if kind == "parts" else 1)
            loss = loss + locater.penalty() if part == (1 if kind == "parts" else 0) else loss
            (loss * (1024 if kind == "scaled" else 1)).backward()
        if kind == "clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        locater.step()
    assert locater.strength == pytest.approx(expected, rel=1e-3)  # the same in every step, and so is their mean
    assert locater.gauge is None and all(not one._post_accumulate_grad_hooks for one in model.parameters())


def train(model, locater, optimizer, steps: int) -> None:
    for _ in range(steps):
        (loss_of(model) + locater.penalty()).backward()
        optimizer.step()
        locater.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stop", [3, STEPS + 2])
def test_a_stop_changes_nothing(stop):
    models = [make(), make()]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    whole = LocAteR(models[0], strength="auto")
    train(models[0], whole, optimizers[0], STEPS + 5)
    first = LocAteR(models[1], strength="auto")
    train(models[1], first, optimizers[1], stop)
    second = LocAteR(models[1], strength="auto")
    second.load_state_dict(first.state_dict())
    first.detach()
    train(models[1], second, optimizers[1], STEPS + 5 - stop)
    assert second.strength == whole.strength
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_lora_is_compared_by_its_own_parameters():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    model = peft.get_peft_model(make(), config)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    for own in (None, optimizer):
        locater = LocAteR(model, strength="auto", optimizer=own)
        (model(input_ids=TOKENS, labels=TOKENS).loss + locater.penalty()).backward()
        optimizer.step()
        locater.step()
        assert 0 < locater.strength < math.inf
        locater.detach()


def test_without_gradients_or_with_a_word_it_is_refused():
    model = make()
    locater = LocAteR(model, strength="auto")
    locater.penalty()
    with pytest.raises(ValueError, match='strength="auto" to go by'):
        locater.step()
    with pytest.raises(ValueError, match="a number or \"auto\", got 'much'"):
        LocAteR(model, strength="much")
    with pytest.raises(ValueError, match="that of a number"):
        locater.load_state_dict(LocAteR(model, strength=1.0).state_dict())


def test_a_wild_step_does_not_decide_and_one_without_a_gradient_does_not_count():
    auto = Auto(share=0.5)
    for ratio in (0.0, 2.0, 3.0, 500.0, 1e-6, 1.0):
        auto.add(ratio)
    assert auto.strength == 2.0 and auto.is_done
    with pytest.raises(ValueError, match="between 0 and 1, got 1.0"):
        Auto(share=1.0)


def test_output_projections_that_start_at_zero_are_waited_for():
    model = make()
    for block in model.transformer.h:
        torch.nn.init.zeros_(block.attn.c_proj.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    locater = LocAteR(model, strength="auto")
    train(model, locater, optimizer, 1)
    assert locater.strength == 0
    train(model, locater, optimizer, STEPS)
    assert locater.strength > 0 and locater.gauge is None


def test_beside_muons_steps_a_decoupled_one_is_lost_and_says_so():
    model = make()
    weights = [block.attn.c_attn.weight for block in model.transformer.h]
    optimizer = torch.optim.Muon(weights, lr=1e-2)
    with pytest.warns(UserWarning, match="add penalty\\(\\) to the loss instead"):
        locater = LocAteR(model, strength="auto", optimizer=optimizer)
    lengths = []
    for _ in range(3):
        loss_of(model).backward()
        for move in (optimizer.step, locater.step):
            before = weights[0].detach().clone()
            move()
            lengths.append(float((weights[0].detach() - before).norm()))
        model.zero_grad()
    assert lengths[-1] < 0.05 * lengths[-2]


def test_detached_it_leaves_no_ear_behind():
    model = make()
    LocAteR(model, strength="auto").detach()
    assert all(not one._post_accumulate_grad_hooks for one in model.parameters())


def chosen(*, by_closure: bool, late: bool) -> float:
    """κ after three steps, of a LocAteR that is made before them, or within the first."""
    model, made = make(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def closure():
        if not made:
            made.append(LocAteR(model, strength="auto", optimizer=optimizer))
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    if not late:
        made.append(LocAteR(model, strength="auto", optimizer=optimizer))
    for _ in range(3):
        if by_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        made[0].step()
    return made[0].strength


def test_a_closure_gives_the_same_choice_as_a_loop():
    """Gradients are made within the step then, and in Lightning a resumed LocAteR comes within it, too."""
    expected = chosen(by_closure=False, late=False)
    assert expected == chosen(by_closure=True, late=False) == chosen(by_closure=True, late=True) > 0
