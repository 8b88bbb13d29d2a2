import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from locater.errors import Refusal
from locater.models.live import open_live
from locater.spectra import moments
from locater.stabilisers import (
    Constant,
    Eta,
    Free,
    Frobenius,
    Initial,
    LocAteR,
    Penalised,
    Projected,
    Until,
    Variance,
    WarmUp,
)
from stabiliser_models import MODELS, Encoder, OwnAttention, gpt2, llama, outputs


def eta_squared(model: nn.Module) -> torch.Tensor:
    """Σ η² over all different heads, from the dense matrices of the scan's own heads."""
    total, seen = torch.zeros((), dtype=torch.float64), set()
    for head in (head for layer in open_live(model).layers() for head in layer.heads):
        place = head.query.weight.data_ptr(), head.key.weight.data_ptr()
        if place not in seen:
            seen.add(place)
            w = head.key.weight.mT @ head.query.weight
            total = total + (torch.trace(w @ w) + 2 * w.square().sum()) / 3
    return total


def gradients(value: torch.Tensor, model: nn.Module) -> dict[str, torch.Tensor]:
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    parameters = [model.get_parameter(name) for name in names]
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    return {name: by for name, by in zip(names, found, strict=True) if by is not None}


@pytest.mark.parametrize("name", MODELS)
def test_penalty_and_gradient_equal_the_dense_ones_in_every_layout(name):
    model = MODELS[name]().double()
    expected = 0.3 * eta_squared(model)
    found = LocAteR(model, strength=0.3).penalty()
    torch.testing.assert_close(found, expected)
    by_hand, ours = gradients(expected, model), gradients(found, model)
    assert by_hand.keys() == ours.keys()
    for key, value in by_hand.items():
        torch.testing.assert_close(ours[key], value)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mean", [Free(), Penalised(0.7, Constant(0.5))], ids=["free", "penalty"])
def test_decoupled_step_is_one_of_gradient_descent_on_the_penalty(name, mean):
    model = MODELS[name]().double()
    expected = gradients(LocAteR(model, strength=2.0, mean=mean).penalty(), model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    locater = LocAteR(model, strength=2.0, mean=mean, optimizer=torch.optim.SGD(model.parameters(), lr=0.05))
    assert locater.penalty() == 0
    locater.step()
    for key, value in model.state_dict().items():
        change = 0.05 * expected[key] if key in expected else torch.zeros(())
        torch.testing.assert_close(value, before[key] - change)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_under_adam_the_decoupled_step_has_the_optimisers_own_unit(name):
    """lr·∇/√(v + mean ∇²) for each head's query and key: worked out from the dense gradient and Adam's state."""
    model = MODELS[name]().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.5, 0.9), weight_decay=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        outputs(model).square().mean().backward()
        optimizer.step()
    expected = gradients(LocAteR(model, strength=5.0).penalty(), model)
    locater = LocAteR(model, strength=5.0, optimizer=optimizer)
    pair = locater.pairs[0]
    before = [weight.detach().clone() for weight in pair.weights()]
    locater.step()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for rows, weight, old in zip(pair.sides, pair.weights() * 2, before * 2, strict=False):
        by = rows.view(expected[names[id(weight)]])
        second = rows.view(optimizer.state[weight]["exp_avg_sq"]) / (1 - 0.9**3)
        unit = (second.mean((-2, -1), keepdim=True) + by.square().mean((-2, -1), keepdim=True)).sqrt()
        torch.testing.assert_close(rows.view(weight.detach()), rows.view(old) - 1e-2 * by / unit)


@pytest.mark.parametrize("strength", [0.03, 3.0])
def test_one_strength_shrinks_alike_in_the_loss_and_decoupled(strength):
    """Under Adam, beside gradients that are noise; a step of −lr·κ∇ in any other unit would end elsewhere."""

    def eta_after(decoupled: bool) -> float:
        torch.manual_seed(0)
        model = OwnAttention(4, 4).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.98))
        own = optimizer if decoupled else None
        locater = LocAteR(model, strength=strength, heads=model.heads, optimizer=own)
        for _ in range(300):
            optimizer.zero_grad()
            noise = [(0.1 * torch.randn_like(weight) * weight).sum() for weight in model.parameters()]
            (sum(noise) + locater.penalty()).backward()
            optimizer.step()
            locater.step()
        return locater.metrics()["qk/layer_00/eta"]

    in_loss, decoupled = eta_after(False), eta_after(True)
    assert 0.5 < decoupled / in_loss < 2


def test_each_parameter_takes_the_learning_rate_of_its_own_group():
    model = OwnAttention().double()
    expected = gradients(LocAteR(model, strength=1.0, heads=model.heads).penalty(), model)
    find, offer = model.find.weight.detach().clone(), model.offer.weight.detach().clone()
    groups = [{"params": [model.find.weight], "lr": 0.1}, {"params": [model.offer.weight], "lr": 0.0}]
    LocAteR(model, strength=1.0, heads=model.heads, optimizer=torch.optim.AdamW(groups)).step()
    torch.testing.assert_close(model.find.weight.detach(), find - 0.1 * expected["find.weight"])
    assert torch.equal(model.offer.weight, offer)


@pytest.mark.parametrize("scale", [Frobenius(), Variance()], ids=lambda s: type(s).__name__)
def test_every_scale_descends(scale):
    model = llama().double()
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            nn.init.uniform_(module.weight, 0.5, 1.5)
    locater = LocAteR(model, strength=1.0, scale=scale)
    value = locater.penalty()
    found = gradients(value, model)
    weight = model.get_parameter("model.layers.0.self_attn.k_proj.weight")
    with torch.no_grad():
        weight[3, 4] += 1e-5
    slope = float(locater.penalty().detach() - value.detach()) / 1e-5
    assert slope == pytest.approx(float(found["model.layers.0.self_attn.k_proj.weight"][3, 4]), rel=1e-2)


class Orthogonalised(torch.optim.Optimizer):
    """Muon's shape of update: the nearest orthogonal matrix to the momentum."""

    def __init__(self, parameters, lr: float) -> None:
        super().__init__(parameters, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(parameter.grad)
                left, _, right = torch.linalg.svd(momentum, full_matrices=False)
                parameter.sub_(left @ right, alpha=group["lr"])


OPTIMISERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "muon": lambda p: Orthogonalised(p, lr=1e-2),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("num_key_heads", [4, 2])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_projection_holds_the_trace_over_two_hundred_steps(name, num_key_heads, dtype):
    model = OwnAttention(4, num_key_heads).to(dtype)
    optimizer = OPTIMISERS[name](model.parameters())
    mean = Projected(WarmUp(1.5, steps=50))
    locater = LocAteR(model, strength=1e-2, mean=mean, heads=model.heads, optimizer=optimizer)
    x = torch.randn(4, 6, 16, dtype=dtype)
    gap, wanted = 0.0, torch.zeros(())
    for _ in range(200):
        optimizer.zero_grad()
        (model(x) - x[..., :4].unsqueeze(1)).square().mean().backward()
        optimizer.step()
        locater.step()
        query = model.find.weight.detach().double().unflatten(0, (num_key_heads, -1, 4))
        key = model.offer.weight.detach().double().unflatten(0, (num_key_heads, 1, 4))
        wanted = locater.targets(0)
        # On their way from a negative start some targets pass through 0, where no error is small beside them.
        gap = max(gap, float((((query * key).sum((-2, -1)) - wanted) / wanted.abs().clamp_min(0.1)).abs().max()))
    assert torch.all(wanted == 3.0)  # 1.5 in units of λ = 2
    assert gap < (1e-6 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("frozen", ["find", "offer"])
def test_projection_leaves_frozen_weights_alone(frozen):
    model = OwnAttention(4, 4).double()
    model.get_submodule(frozen).weight.requires_grad_(False)
    before = model.get_submodule(frozen).weight.clone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    mean = Projected(Constant(0.4))
    locater = LocAteR(model, strength=0.1, mean=mean, heads=model.heads, optimizer=optimizer)
    locater.step()
    assert torch.equal(model.get_submodule(frozen).weight, before)
    assert locater.metrics()["qk/layer_00/trace"] == pytest.approx(0.4, rel=1e-12)


def test_the_literal_trace_of_square_diverges_and_eta_does_not():
    from locater.stabilisers import TraceOfSquare

    def largest(scale) -> float:
        torch.manual_seed(1)
        model = OwnAttention(4, 4).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        locater = LocAteR(model, strength=0.1, scale=scale, heads=model.heads)
        for _ in range(400):
            optimizer.zero_grad()
            value = locater.penalty()
            if not torch.isfinite(value) or value.abs() > 1e6:
                return float("inf")
            value.backward()
            optimizer.step()
        w = model.offer.weight.mT @ model.find.weight
        return float(w.square().sum())

    with pytest.warns(UserWarning, match="unbounded"):
        literal = TraceOfSquare()
    assert largest(literal) == float("inf")
    assert largest(Eta()) < largest_at_start()


def largest_at_start() -> float:
    torch.manual_seed(1)
    model = OwnAttention(4, 4).double()
    return float((model.offer.weight.mT @ model.find.weight).square().sum())


def train(model, locater, optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (outputs(model).square().mean() + locater.penalty()).backward()
        optimizer.step()
        locater.step()


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_resumed_run_continues_to_the_bit(decoupled):
    def make(seed: int):
        torch.manual_seed(seed)
        model = gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        own = optimizer if decoupled else None
        return model, optimizer, LocAteR(model, strength=1e-2, mean=Projected(WarmUp(0.05, 20)), optimizer=own)

    model, optimizer, locater = make(0)
    train(model, locater, optimizer, 3)
    saved = [part.state_dict() for part in (model, optimizer, locater)]
    saved = torch.load(_round_trip(saved), weights_only=True)
    train(model, locater, optimizer, 3)
    other, other_optimizer, other_locater = make(1)
    for part, state in zip((other, other_optimizer, other_locater), saved, strict=True):
        part.load_state_dict(state)
    train(other, other_locater, other_optimizer, 3)
    assert other_locater.steps == 6
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def _round_trip(state):
    import io

    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


def test_the_graph_keeps_three_small_matrices_per_head():
    model = llama(hidden_size=256, num_attention_heads=8, num_key_value_heads=8, num_hidden_layers=1)
    parameters, kept = {p.data_ptr() for p in model.parameters()}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        LocAteR(model, strength=1.0, mean=Penalised(1.0)).penalty()
    numbers = sum(tensor.numel() for tensor in kept if tensor.data_ptr() not in parameters)
    assert 0 < numbers <= 3 * 32 * 32 * 8 + 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_moments_are_float32_under_mixed_precision(dtype):
    model = llama().to(dtype)
    expected = LocAteR(llama_like(model), strength=1.0).penalty()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = LocAteR(model, strength=1.0).penalty()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=0)
    found.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.dtype == dtype


def llama_like(model):
    copy = llama().double()
    copy.load_state_dict(model.state_dict())
    return copy


def test_low_precision_weights_are_written_back():
    model = llama().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    locater = LocAteR(model, strength=0.0, mean=Projected(Constant(0.05)), optimizer=optimizer)
    locater.step()
    assert locater.metrics()["qk/layer_00/trace"] == pytest.approx(0.05, rel=0.05)


def test_gradient_checkpointing_changes_nothing():
    model = Encoder().double()
    locater = LocAteR(model, strength=1.0)
    plain = gradients(outputs(model).square().mean() + locater.penalty(), model)
    rerun = checkpoint(lambda: outputs(model).square().mean() + locater.penalty(), use_reentrant=False)
    for key, value in gradients(rerun, model).items():
        torch.testing.assert_close(value, plain[key])


def test_frozen_and_tied_heads_are_left_out_and_said_so():
    model = llama()
    model.model.layers[0].self_attn.requires_grad_(False)
    with pytest.warns(UserWarning, match="left out: decoder layer 0 .* are frozen"):
        locater = LocAteR(model, strength=1.0)
    assert [pair.layer for pair in locater.pairs] == [1]
    tied = OwnAttention(4, 4)
    tied.offer.weight = tied.find.weight
    with pytest.raises(Refusal, match="query and key are one weight"):
        LocAteR(tied, strength=1.0, heads=tied.heads)


def test_layers_that_share_their_weights_count_once():
    locater = LocAteR(MODELS["albert"](), strength=1.0)
    assert len(locater.pairs) == 1


def test_low_rank_adapters_are_penalised_as_the_weight_that_acts():
    peft = pytest.importorskip("peft")
    model = llama().double()
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_alpha=4, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).double()
    locater = LocAteR(adapted, strength=0.5)
    merged = llama().double()
    state = {key.replace("base_layer.", ""): value for key, value in model.state_dict().items() if "lora" not in key}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            state[f"{name}.weight"] = state[f"{name}.weight"] + module.get_delta_weight("default")
    merged.load_state_dict(state)
    torch.testing.assert_close(locater.penalty(), 0.5 * eta_squared(merged))
    expected = gradients(locater.penalty(), adapted)
    assert all("lora" in name for name in expected)
    before = {name: adapted.get_parameter(name).detach().clone() for name in expected}
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    LocAteR(adapted, strength=0.5, optimizer=torch.optim.SGD(trained, lr=0.1)).step()
    for name, by in expected.items():
        torch.testing.assert_close(adapted.get_parameter(name).detach(), before[name] - 0.1 * by)
    held = LocAteR(adapted, strength=0.5, mean=Projected(), optimizer=torch.optim.SGD(trained, lr=0.1))
    with pytest.raises(Refusal, match="plain parameters to project"):
        held.step()


def test_compiled_penalty_equals_the_eager_one():
    """In a process of its own: the compiler cannot look through the checks of shapes that tests put on."""
    script = Path(__file__).parents[1] / "compiled_stabilisers.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_compiled_model_has_its_heads():
    assert len(LocAteR(torch.compile(llama()), strength=1.0).pairs) == 2


def test_metrics_name_layers_and_on_request_heads():
    model = llama().double()
    locater = LocAteR(model, strength=1.0)
    found = locater.metrics()
    assert sorted(found) == [f"qk/layer_{n:02d}/{what}" for n in range(2) for what in ("eta", "trace", "xi")]
    single = locater.metrics(heads=True)
    heads = next(iter(open_live(model).layers())).heads
    for head in heads:
        expected = moments(head.query.weight, head.key.weight)
        assert single[f"qk/layer_00/head_{head.index:02d}/xi"] == pytest.approx(float(expected.xi.detach()))
    mean = sum(single[f"qk/layer_00/head_{n:02d}/eta"] for n in range(4)) / 4
    assert found["qk/layer_00/eta"] == pytest.approx(mean)
    both = LocAteR(nn.Transformer(16, 2, 1, 1, 16), strength=1.0).metrics()
    assert {key.split("/")[1] for key in both} == {"encoder", "decoder", "cross"}


def test_targets_warm_up_or_keep_what_was():
    initial = torch.tensor([[0.5, -0.5]])
    assert torch.equal(WarmUp(2.0, 4).at(1, initial), torch.tensor([[0.875, 0.125]]))
    assert torch.equal(WarmUp(2.0, 4).at(9, initial), torch.tensor([[2.0, 2.0]]))
    assert torch.equal(Initial().at(9, initial), initial)
    assert torch.equal(Until(WarmUp(2.0, 4), 3).at(1, initial), torch.tensor([[0.875, 0.125]]))
    assert Until(Initial(), 3).at(3, initial) is not None and Until(Initial(), 3).at(4, initial) is None


@pytest.mark.parametrize("hold", [Projected, lambda target: Penalised(1.0, target)], ids=["projection", "penalty"])
@pytest.mark.parametrize("decoupled", [True, False])
def test_a_mean_that_is_let_go_is_free(hold, decoupled):
    """Held, it differs from a free one; after the last held step, the two move alike from the same weights."""
    torch.manual_seed(0)
    model = OwnAttention(4, 4).double()

    def moved(mean, steps):
        copy = deepcopy(model)
        own = torch.optim.SGD(copy.parameters(), lr=0.1)
        locater = LocAteR(copy, strength=0.3, mean=mean, heads=copy.heads, optimizer=own if decoupled else None)
        locater.load_state_dict(locater.state_dict() | {"steps": steps})
        own.zero_grad()
        penalty = locater.penalty()
        if penalty.requires_grad:
            penalty.backward()
        own.step()
        locater.step()
        return copy.find.weight.detach()

    target = Until(Constant(0.4), 5)
    assert not torch.equal(moved(hold(target), 2), moved(Free(), 2))
    assert torch.equal(moved(hold(target), 9), moved(Free(), 9))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (None, Free),
        ("free", Free),
        ("initial", Projected()),
        (0.01, Projected(WarmUp(0.01, 100))),
        (2.0, Projected(WarmUp(2.0))),
    ],
    ids=str,
)
def test_a_mean_is_given_in_a_word_or_a_number(given, meant):
    mean = LocAteR(llama(), strength=1.0, mean=given).mean
    assert type(mean) is Free if meant is Free else mean == meant


def bad_mean():
    LocAteR(llama(), strength=1.0, mean="middle")


def infinite_mean():
    LocAteR(llama(), strength=1.0, mean=float("inf"))


def bad_strength():
    LocAteR(llama(), strength=-1.0)


def bad_weight():
    Penalised(-1.0)


def bad_warm_up():
    WarmUp(1.0, 0)


def bad_end():
    Until(Initial(), 0)


def no_attention():
    model = nn.Sequential(nn.Linear(4, 4))
    LocAteR(model, strength=1.0)
    model(torch.ones(2, 4))


def foreign_optimiser():
    LocAteR(llama(), strength=1.0, optimizer=torch.optim.SGD(llama().parameters(), lr=0.1))


def no_optimiser():
    LocAteR(llama(), strength=1.0).step()


def out_of_reach():
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for layer in model.model.layers:
        layer.self_attn.k_proj = nn.Linear(32, 32, bias=False)
        layer.self_attn.k_proj.weight.data = -layer.self_attn.q_proj.weight.data
    model.config.num_key_value_heads = 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    LocAteR(model, strength=0.0, mean=Projected(Constant(50.0)), optimizer=optimizer).step()


def not_a_number_at_start():
    model = llama()
    model.model.layers[1].self_attn.k_proj.weight.data[0, 0] = float("nan")
    LocAteR(model, strength=1.0)


def not_a_number_later():
    model = llama()
    locater = LocAteR(model, strength=1.0, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    model.model.layers[1].self_attn.k_proj.weight.data[0, 0] = float("nan")
    locater.step()


def not_a_number_in_the_loss():
    model = llama()
    locater = LocAteR(model, strength=1.0)
    model.model.layers[1].self_attn.k_proj.weight.data[0, 0] = float("nan")
    locater.penalty()


def other_state():
    LocAteR(llama(), strength=1.0).load_state_dict(LocAteR(Encoder(), strength=1.0).state_dict())


BAD = {
    bad_strength: "strength of at least 0, got -1",
    bad_mean: 'a finite number, "initial" or "free", got .middle.',
    infinite_mean: "a finite number",
    bad_weight: "weight of the mean penalty of at least 0",
    bad_warm_up: "warm-up of at least one step",
    bad_end: "held for at least one step",
    no_attention: "missing attention in one pass of Sequential",
    foreign_optimiser: "optimiser that owns `model.layers.0.self_attn.q_proj.weight`",
    no_optimiser: r"penalty\(\) in the loss, or an optimiser",
    out_of_reach: "decoder layer 0 .* within reach, got 141.4 where tr W = -",
    not_a_number_at_start: "finite query and key weights",
    not_a_number_later: "finite query and key weights",
    not_a_number_in_the_loss: "finite query and key weights",
    other_state: "state of a model with these heads",
}


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.__name__)
def test_bad_input_is_refused_in_a_sentence(case):
    with pytest.raises(Refusal, match=BAD[case]):
        case()
