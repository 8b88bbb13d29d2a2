"""What stabilisers write lasts under optimisers with master weights, as under AdamW in fp32; or it is refused."""

from contextlib import nullcontext

import pytest
import torch

from launch import torchrun, uses_torchrun
from locater import head_rows, scan
from locater.errors import Refusal
from locater.models.live.masters import Copy, current, write_master
from locater.monitor import RollBack
from locater.monitor.actions import Event, OwnLoop
from locater.monitor.report import Report
from locater.stabilisers import LocAteR, Projected, QKClip, QKDecay
from master_weights import SEEN, Hidden, InState, plain
from stabiliser_models import TOKENS, gpt2, llama

STEPS = 40
MODELS = {"llama": llama, "gpt2": gpt2}


def make(name: str, dtype: torch.dtype):
    torch.manual_seed(0)
    return MODELS[name](tie_word_embeddings=False).to(dtype)


def norms(model) -> float:
    """Σ ‖W_Q‖‖W_K‖ over layers: what the loss makes grow and every decay holds."""
    watch = LocAteR(model, strength=0.0)
    total = 0.0
    for pair in watch.pairs:
        weights = [one.detach().float() for one in pair.weights()]
        total += float(pair.query.view(weights[0]).norm() * pair.key.view(weights[-1]).norm())
    watch.detach()
    return total


def traces(model) -> list[float]:
    watch = LocAteR(model, strength=0.0)
    metrics = watch.metrics(heads=True)
    watch.detach()
    return [value for key, value in metrics.items() if "head" in key and key.endswith("trace")]


def largest(model) -> float:
    watch = QKClip(model, log_only=True)
    loss(model)
    watch.step()
    found = max(watch.metrics().values())
    watch.detach()
    return found


def loss(model) -> torch.Tensor:
    # Far from what a model gives at first, so that queries and keys grow.
    return model(TOKENS, labels=TOKENS.flip(1)).loss


ARMS = {
    "LocAteR": (norms, lambda model, optimizer: LocAteR(model, strength=1.0, optimizer=optimizer)),
    "LocAteR, auto": (norms, lambda model, optimizer: LocAteR(model, strength="auto", optimizer=optimizer)),
    "QKDecay": (norms, lambda model, optimizer: QKDecay(model, decay=8.0, optimizer=optimizer)),
    "Projected": (traces, lambda model, optimizer: LocAteR(model, strength=0.0, mean=Projected())),
    "Projected, decoupled": (
        traces,
        lambda model, optimizer: LocAteR(model, strength=0.1, mean=3.5, optimizer=optimizer),
    ),
    "QKClip": (largest, lambda model, optimizer: QKClip(model, threshold=0.02)),
}


def train(model, optimizer, stabiliser=None) -> None:
    """The last step is the optimiser's: what was written before it must still be there."""
    for step in range(STEPS + 1):
        value = loss(model) + (stabiliser.penalty() if stabiliser else 0)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if stabiliser and step < STEPS:
            stabiliser.step()
    if stabiliser:
        stabiliser.detach()


REFERENCES: dict[tuple[str, str], tuple] = {}


def reference(arm: str, name: str) -> tuple:
    """The effect with AdamW in fp32, and what it is without the stabiliser."""
    if (arm, name) not in REFERENCES:
        measure, build = ARMS[arm]
        effects = []
        for kind in (build, lambda model, optimizer: None):
            model = make(name, torch.float32)
            optimizer = plain(model.parameters())
            train(model, optimizer, kind(model, optimizer))
            effects.append(torch.tensor(measure(model)))
        REFERENCES[arm, name] = tuple(effects)
    return REFERENCES[arm, name]


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize(("name", "design"), [*(("llama", one) for one in (*SEEN, "plain")), ("gpt2", "groups")])
def test_the_effect_is_that_of_fp32(arm, name, design):
    measure, build = ARMS[arm]
    expected, without = reference(arm, name)
    model = make(name, torch.bfloat16)
    optimizer = (SEEN | {"plain": plain})[design](model.parameters())
    train(model, optimizer, build(model, getattr(optimizer, "optimizer", optimizer)))
    effect = torch.tensor(measure(model))
    acted = (expected - without).abs().mean()
    # Pure bf16 has no more than eight bits: there only that the effect is not lost can be asked.
    allowed = 0.1 if design != "plain" else 0.5
    assert (effect - expected).abs().mean() < allowed * acted, (effect, expected, without)


@pytest.mark.parametrize("arm", ARMS)
def test_hidden_copies_are_refused_at_the_first_step_that_undoes(arm):
    model = make("llama", torch.bfloat16)
    optimizer = Hidden(model.parameters())
    stabiliser = ARMS[arm][1](model, optimizer)
    for step in range(2):  # the second is the first that can undo what was written
        (loss(model) + stabiliser.penalty()).backward()
        optimizer.step()
        with pytest.raises(Refusal, match="master weights") if step else nullcontext():
            stabiliser.step()


def test_a_custom_optimiser_without_copies_is_left_in_peace():
    """The mark is taken out again, and only one entry of each parameter misses one update."""

    class Custom(torch.optim.SGD):
        pass

    models = [make("llama", torch.bfloat16) for _ in range(2)]
    for model, kind in zip(models, (Custom, torch.optim.SGD), strict=True):
        optimizer = kind(model.parameters(), lr=0.1)
        stabiliser = QKClip(model, threshold=1e9)
        for _ in range(3):
            loss(model).backward()
            optimizer.step()
            stabiliser.step()
        assert stabiliser.writes.hook is None
    differing = [int((one != other).sum()) for one, other in zip(*(m.parameters() for m in models), strict=True)]
    assert sum(differing) <= 3 * 4 * 32  # later updates follow the first few entries that differ
    largest = max(
        float((one - other).detach().abs().max()) for one, other in zip(*(m.parameters() for m in models), strict=True)
    )
    assert largest < 0.05


@pytest.mark.parametrize("design", SEEN)
def test_rolling_back_lasts(design):
    model = make("llama", torch.bfloat16)
    optimizer = SEEN[design](model.parameters())
    for _ in range(2):
        loss(model).backward()
        optimizer.step()
    event = Event(Report(1, ()), model, OwnLoop(model, [optimizer]))
    action = RollBack()
    action.begin(model, event.host, None)
    kept = {name: current(one).clone() for name, one in model.named_parameters()}
    for group in optimizer.param_groups:
        group["lr"] = 0.5  # the run diverges
    loss(model).backward()
    optimizer.step()
    action(event)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(2):
        loss(model).backward()
        optimizer.step()
    for name, one in model.named_parameters():
        assert current(one).dtype == torch.float32 and torch.equal(current(one), kept[name])
        assert torch.equal(one, kept[name].to(one.dtype))


def test_rolling_back_over_hidden_copies_is_told_and_does_not_end_the_run():
    model = make("llama", torch.bfloat16)
    optimizer = Hidden(model.parameters())
    event = Event(Report(1, ()), model, OwnLoop(model, [optimizer]))
    action = RollBack()
    action.begin(model, event.host, None)
    for rate in (0.5, 1e-3):
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss(model).backward()
        optimizer.step()
        if rate == 0.5:
            action(event)
    optimizer.step()
    assert "master weights" in str(action.check(event.host)) and action.check(event.host) is None


def test_a_run_of_entries_is_read_and_written_in_its_place():
    """Megatron's distributed optimiser: each process has the master of a part of the flat parameter."""
    parameter = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.bfloat16))
    copy = parameter.detach().float().flatten()[5:17].clone() + 1e-6
    parameter.main_param = copy
    assert isinstance(Copy(parameter, lambda: copy), Copy)
    value = current(parameter)
    assert torch.equal(value.flatten()[5:17], copy)
    write_master(parameter, value * 3)
    assert torch.equal(copy, value.flatten()[5:17] * 3)
    assert torch.equal(parameter, (value * 3).bfloat16())


def test_one_write_reaches_the_copy_in_the_state():
    model = make("llama", torch.bfloat16)
    optimizer = InState(model.parameters())
    clip = QKClip(model, threshold=1e-3)
    loss(model).backward()
    optimizer.step()
    weight = model.model.layers[0].self_attn.q_proj.weight
    before = optimizer.state[weight]["master"].clone()
    clip.step()
    after = optimizer.state[weight]["master"]
    assert not torch.equal(before, after) and torch.equal(after.bfloat16(), weight)


@pytest.mark.slow
@uses_torchrun
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_itself(stage):
    """In bf16 on two processes, by gloo; stage 3 leaves nothing but placeholders in the model."""
    pytest.importorskip("deepspeed")
    output = torchrun("deepspeed_stabilisers.py", stage, num_processes=2)
    lines = [line.split() for line in output.splitlines() if line.startswith(f"stage {stage}: ")]
    assert [line[2] for line in lines] == ["LocAteR", "Projected", "QKDecay", "QKClip", "none"]
    for _, _, name, *numbers in lines:
        effect, expected, without = map(float, numbers)
        assert name == "none" or without > 2 * expected
        assert abs(effect - expected) < 0.1 * without


def test_placeholders_of_zero_3_are_named():
    """Shapes are known, so heads are found; weights are read only where they were gathered."""
    model = make("llama", torch.float32)
    weight = model.model.layers[0].self_attn.q_proj.weight
    whole, weight.ds_shape, weight.ds_id = weight.data, weight.shape, 0
    weight.data = torch.empty(0)
    assert len(head_rows(model)) == 8
    with pytest.raises(Refusal, match=r"q_proj.weight.*DeepSpeed ZeRO-3.*GatheredParameters"):
        scan(model)
    with pytest.raises(Refusal, match="DeepSpeed ZeRO-3"):
        LocAteR(model, strength=0.1)
    weight.data = whole
    assert len(scan(model).heads) == 8
