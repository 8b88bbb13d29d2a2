import copy
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from locater.attention.calls import AttentionCall
from locater.errors import Refusal
from locater.models.live import open_live
from locater.spectra import moments
from locater.stabilisers import (
    L2,
    RMS,
    EntropyBonus,
    LocAteR,
    QKClip,
    QKDecay,
    QKNorm,
    SigmaReparam,
    SoftCap,
    Stabiliser,
    ZLoss,
)
from locater_lab.rivals import SpectralInitialisation, SpectralNorm
from stabiliser_models import MODELS, TOKENS, Encoder, OwnAttention, gpt2, llama, outputs

RIVALS = {
    "soft-cap": lambda model: SoftCap(model, cap=0.05),
    "qk-norm rms": lambda model: QKNorm(model),
    "qk-norm l2": lambda model: QKNorm(model, kind=L2(16)),
    "z-loss": lambda model: ZLoss(model, weight=0.1),
    "entropy": lambda model: EntropyBonus(model, weight=0.1),
    "clip, log only": lambda model: QKClip(model, threshold=1e-3, log_only=True),
    "sigma-reparam": lambda model: SigmaReparam(model),
    "spectral norm": lambda model: SpectralNorm(model),
    "decay": lambda model: QKDecay(model, decay=0.1),
    "locater": lambda model: LocAteR(model, strength=1.0),
    "none": lambda model: Stabiliser(),
}
REPLACING = ("soft-cap", "qk-norm rms", "qk-norm l2")
SLOTTED = (*REPLACING, "z-loss", "entropy", "clip, log only")
BIGGER = 8.0  # small random weights make all attention alike


def grown(make) -> nn.Module:
    """Query and key weights large enough that a change in attention shows."""
    model = make()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "c_attn", "query", "key", "qkv", "in_proj")):
                parameter.mul_(BIGGER)
    return model.eval()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rival", RIVALS)
def test_detaching_leaves_no_trace(rival, model):
    if rival in REPLACING and model == "codegen":
        return  # its attention is written out, so its output cannot be replaced
    model = grown(MODELS[model])
    before, keys = outputs(model), list(model.state_dict())
    attributes = [sorted(vars(module)) for module in model.modules()]
    parameters = [id(parameter) for parameter in model.parameters()]
    stabiliser = RIVALS[rival](model)
    during = outputs(model)
    (during.square().mean() + stabiliser.penalty()).backward()
    stabiliser.step()
    assert all(isinstance(value, float) for value in stabiliser.metrics().values())
    stabiliser.detach()
    assert torch.equal(outputs(model), before)
    assert list(model.state_dict()) == keys
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert [id(parameter) for parameter in model.parameters()] == parameters


def test_rivals_that_should_change_the_output_do():
    for rival in ("soft-cap", "qk-norm rms", "qk-norm l2", "sigma-reparam", "spectral norm"):
        model = grown(llama)
        before = outputs(model)
        RIVALS[rival](model)
        assert not torch.allclose(outputs(model), before, atol=1e-4), rival
    for rival in ("z-loss", "entropy", "clip, log only"):
        model = grown(llama)
        before = outputs(model)
        RIVALS[rival](model)
        torch.testing.assert_close(outputs(model), before)


def call(**options) -> AttentionCall:
    query = torch.randn(2, 4, 6, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 6, 8, dtype=torch.float64)
    return AttentionCall(query, key, value, enable_gqa=True, **options)


MASK = torch.ones(6, 6, dtype=torch.bool).tril(1)
CALLS = [
    dict(),
    dict(is_causal=True),
    dict(attn_mask=MASK),
    dict(attn_mask=torch.randn(2, 1, 6, 6).double(), scale=0.3),
]


@pytest.mark.parametrize("options", CALLS, ids=["plain", "causal", "mask", "bias and scale"])
def test_materialised_attention_is_that_of_the_kernel(options):
    one = call(**options)
    torch.testing.assert_close(one.finish(one.masked(one.raw()).double()), one.attend(), rtol=1e-5, atol=1e-6)


def written_out(model: OwnAttention, x: torch.Tensor, change) -> torch.Tensor:
    """The attention of the tests' own module by hand, with its queries, keys and logits changed."""
    q = model.find(x).unflatten(-1, (4, 4)).transpose(1, 2)
    k = model.offer(x).unflatten(-1, (4, 4)).transpose(1, 2)
    return change(q, k, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()) @ k


def softmax(logits: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(~seen, -torch.inf).softmax(-1)


def capped(q, k, seen):
    return softmax(0.7 * torch.tanh(q @ k.mT / 2 / 0.7), seen)


def rms_normed(q, k, seen):
    q, k = (x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    return softmax(q @ k.mT / 2, seen)


def l2_normed(q, k, seen):
    return softmax(math.log2(90) * functional.cosine_similarity(q[..., None, :], k[..., None, :, :], dim=-1), seen)


CHANGES = {
    "cap": (lambda model, heads: SoftCap(model, cap=0.7, heads=heads), capped),
    "rms": (lambda model, heads: QKNorm(model, kind=RMS(), heads=heads), rms_normed),
    "l2": (lambda model, heads: QKNorm(model, kind=L2(10), heads=heads), l2_normed),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_attention_is_what_the_formula_says(name):
    model = OwnAttention(4, 4).double()
    holder = nn.ModuleList([model])
    make, change = CHANGES[name]
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    expected = written_out(model, x, change)
    stabiliser = make(holder, model.heads)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    assert len(stabiliser.parameters()) == {"cap": 0, "rms": 2, "l2": 1}[name]


def test_attention_losses_are_what_their_formulas_say():
    model = OwnAttention(4, 4).double()
    holder, x = nn.ModuleList([model]), torch.randn(2, 6, 16, dtype=torch.float64)
    q = model.find(x).unflatten(-1, (4, 4)).transpose(1, 2)
    k = model.offer(x).unflatten(-1, (4, 4)).transpose(1, 2)
    logits = (q @ k.mT / 2).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
    p = logits.softmax(-1)
    expected = {
        ZLoss: 0.3 * logits.exp().sum(-1).log().square().mean(),
        EntropyBonus: -0.3 * torch.special.entr(p).sum(-1).mean(),
    }
    for kind, value in expected.items():
        stabiliser = kind(holder, weight=0.3, heads=model.heads)
        model(x)
        found = stabiliser.penalty()
        torch.testing.assert_close(found.double(), value, rtol=1e-5, atol=1e-7)
        by = torch.autograd.grad(found, model.find.weight)[0]
        assert torch.isfinite(by).all()
        assert by.abs().max() > 0
        assert stabiliser.penalty() == 0  # nothing gathered since
        stabiliser.detach()


def test_recomputed_activations_count_once():
    model = OwnAttention(4, 4)
    stabiliser = ZLoss(nn.ModuleList([model]), weight=1.0, heads=model.heads)
    x = torch.randn(2, 6, 16, requires_grad=True)
    out = checkpoint(model, x, use_reentrant=False)
    (out.square().mean() + stabiliser.penalty()).backward()
    assert not stabiliser.gathered


def test_two_slots_can_stand_in_one_module():
    model = OwnAttention(4, 4).double()
    holder, x = nn.ModuleList([model]), torch.randn(2, 6, 16, dtype=torch.float64)
    clip = QKClip(holder, threshold=1e9, heads=model.heads)
    norm = QKNorm(holder, heads=model.heads)
    torch.testing.assert_close(model(x), written_out(model, x, rms_normed), rtol=1e-5, atol=1e-6)
    clip.step()
    assert clip.metrics()["qk/layer_00/max_logit"] <= 2.0 + 1e-6  # normalised queries reached the outer slot
    norm.detach()
    clip.detach()
    assert "forward" not in vars(model)


@pytest.mark.parametrize("keys", [4, 2])
def test_heads_whose_logits_are_all_negative_are_left_alone(keys):
    """threshold / max is negative there: its root is NaN, and shared keys would turn queries round."""
    model = llama(num_key_value_heads=keys, attention_bias=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.bias.fill_(0.0)[::8] = 30.0
            layer.self_attn.k_proj.bias.fill_(0.0)[::8] = -30.0
    before = copy.deepcopy(model.state_dict())
    clip = QKClip(model, threshold=1e3)
    model(TOKENS[:, :1]).logits.sum().backward()
    clip.step()
    assert all(value < 0 for value in clip.metrics(heads=True).values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["gpt2", "llama", "torch", "neox"])
def test_clip_brings_every_head_to_the_threshold(name):
    model = grown(MODELS[name])
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("c_attn.bias", "in_proj_bias")):
                nn.init.normal_(parameter)
    clip = QKClip(model, threshold=0.05)
    outputs(model)
    clip.step()
    before = clip.metrics(heads=True)
    first = {key: value for key, value in before.items() if "layer_00/head" in key}
    assert max(first.values()) > 0.05
    outputs(model)
    clip.step()
    after = clip.metrics(heads=True)
    for key, value in first.items():  # later layers see other inputs
        assert after[key] == pytest.approx(min(value, 0.05), rel=1e-4)


@pytest.mark.parametrize("frozen", ["q_proj", "k_proj"])
def test_clip_leaves_what_is_frozen_alone(frozen):
    model = grown(partial(llama, num_key_value_heads=4))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    before = {name: one.detach().clone() for name, one in model.named_parameters() if frozen in name}
    clip = QKClip(model, threshold=0.05)
    for _ in range(2):
        outputs(model)
        clip.step()
    assert clip.metrics()["qk/layer_00/max_logit"] == pytest.approx(0.05, rel=1e-4)
    assert all(torch.equal(model.get_parameter(name), one) for name, one in before.items())


def test_clip_measures_the_logits_that_the_scan_knows():
    model = grown(llama)
    clip = QKClip(model, threshold=1e9, log_only=True)
    captured = {}
    hook = model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda m, args, out: captured.update(x=args[0]))
    outputs(model)
    hook.remove()
    clip.step()
    found = clip.metrics(heads=True)
    for head in next(iter(open_live(model).layers())).heads:
        logits = head.logits(captured["x"], captured["x"]).masked_fill(~torch.ones(9, 9).bool().tril(), -torch.inf)
        assert found[f"qk/layer_00/head_{head.index:02d}/max_logit"] == pytest.approx(
            float(logits.max().detach()), rel=1e-4
        )


def test_logging_alone_changes_no_weight():
    model = grown(gpt2)
    before = [parameter.clone() for parameter in model.parameters()]
    clip = QKClip(model, threshold=1e-6, log_only=True)
    outputs(model)
    clip.step()
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))


def test_sigma_reparam_divides_by_the_spectral_norm_and_learns_a_gain():
    model = gpt2().double().train()
    weight = model.transformer.h[0].mlp.c_fc.weight.detach().clone()
    stabiliser = SigmaReparam(model)
    for _ in range(200):
        model.transformer.h[0].mlp.c_fc.weight  # noqa: B018 - each reading turns the vectors once
    expected = weight / torch.linalg.matrix_norm(weight, 2)
    torch.testing.assert_close(model.transformer.h[0].mlp.c_fc.weight.detach(), expected, rtol=1e-4, atol=1e-8)
    assert len(stabiliser.parameters()) == 8  # four maps in each of two layers; the output is the embedding
    outputs(model).square().mean().backward()
    assert all(gain.grad is not None for gain in stabiliser.parameters())
    assert set(stabiliser.metrics()) == {"sigma_reparam/mean_gain", "sigma_reparam/max_gain"}
    model.eval()
    during = outputs(model)
    stabiliser.detach(bake=True)
    torch.testing.assert_close(outputs(model), during)


@pytest.mark.parametrize("name", ["gpt2", "llama", "neox", "torch"])
def test_spectral_norm_of_queries_and_of_keys_is_one(name):
    model = MODELS[name]().double().train()
    values = {key: value.clone() for key, value in model.state_dict().items() if "v_proj" in key or "dense" in key}
    stabiliser = SpectralNorm(model)
    for _ in range(300):
        for module, attribute in stabiliser.places:
            getattr(module, attribute)
    stabiliser.detach(bake=True)
    for layer in open_live(model).layers():
        query = torch.cat([head.query.weight for head in layer.heads]).detach()
        key = torch.cat(
            [head.key.weight for head in layer.heads[:: len(layer.heads) // (1 + layer.heads[-1].key_index)]]
        )
        for weight in (query, key.detach()):
            assert float(torch.linalg.matrix_norm(weight, 2)) == pytest.approx(1.0, rel=1e-4)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in values.items())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_decay_in_the_loss_and_decoupled_agree_for_plain_descent(name):
    model, other = MODELS[name]().double(), MODELS[name]().double()
    other.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    QKDecay(model, decay=0.5).penalty().backward()
    optimizer.step()
    QKDecay(other, decay=0.5, optimizer=torch.optim.SGD(other.parameters(), lr=0.1)).step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)
    with pytest.raises(Refusal, match="owns"):
        QKDecay(other, decay=0.5, optimizer=torch.optim.SGD(gpt2().parameters(), lr=0.1)).step()


@pytest.mark.parametrize("name", ["gpt2", "llama", "torch"])
@pytest.mark.parametrize("xi", [1.5, -0.8, 0.0])
def test_spectral_initialisation_gives_what_was_asked(name, xi):
    model = MODELS[name]().double()
    SpectralInitialisation(model, xi=xi, eta=0.6)
    for layer in open_live(model).layers():
        for head in layer.heads:
            found = moments(head.query.weight.detach(), head.key.weight.detach())
            assert float(found.xi) == pytest.approx(xi, abs=1e-9)
            assert float(found.eta) / head.temperature == pytest.approx(0.6, rel=1e-9)


BAD = {
    "xi": (lambda: SpectralInitialisation(llama(), xi=9.0, eta=1.0), r"decoder layer 0 .*\|ξ\| below 2\."),
    "eta": (lambda: SpectralInitialisation(llama(), xi=1.0, eta=0.0), "positive, finite η"),
    "cap": (lambda: SoftCap(llama(), cap=0.0), "positive, finite cap"),
    "threshold": (lambda: QKClip(llama(), threshold=-1.0), "positive, finite threshold"),
    "length": (lambda: L2(1), "length of at least 2"),
    "weight": (lambda: ZLoss(llama(), weight=-1.0), "weight of at least 0"),
    "no linear": (lambda: SigmaReparam(nn.ReLU()), "model with linear layers"),
    "twice": (lambda: (QKNorm(model := llama()), QKNorm(model)), "detach"),
    "state": (lambda: Stabiliser().load_state_dict({"steps": 1}), "an empty state"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_a_sentence(case):
    make, message = BAD[case]
    with pytest.raises(Refusal, match=message):
        make()


def test_attention_that_bypasses_the_slot_is_refused():
    model = llama()
    model.set_attn_implementation("eager")
    for make in REPLACING:
        stabiliser = RIVALS[make](model)
        with pytest.raises(Refusal, match="attn_implementation='sdpa'"):
            model(input_ids=TOKENS)
        stabiliser.detach()


@pytest.mark.parametrize("make", [lambda m: ZLoss(m, weight=1.0), lambda m: EntropyBonus(m, weight=1.0), QKClip])
def test_attention_that_is_written_out_shows_the_same_logits(make):
    model, found = grown(llama), {}
    for kind in ("sdpa", "eager"):
        model.set_attn_implementation(kind)
        stabiliser = make(model)
        model(input_ids=TOKENS)
        penalty = stabiliser.penalty()
        stabiliser.step()
        found[kind] = torch.tensor([*stabiliser.metrics(heads=True).values(), float(penalty.detach())])
        stabiliser.detach()
    assert len(found["sdpa"]) > 1 or found["sdpa"].abs() > 0
    torch.testing.assert_close(found["eager"], found["sdpa"], rtol=1e-5, atol=1e-6)


def test_qk_clip_by_weights_holds_every_logit_without_a_pass():
    model = grown(llama)
    clip = QKClip(model, threshold=2.0, by="weights")
    clip.step()
    assert min(clip.metrics(heads=True).values()) > 2.0, "something to clip"
    clip.step()
    assert max(abs(value - 2.0) for key, value in clip.metrics(heads=True).items() if "head" in key) < 1e-3
    watch = QKClip(model, log_only=True)
    model(input_ids=torch.randint(0, 32, (8, 16)))
    watch.step()
    assert 0 < max(watch.metrics().values()) <= 2.0
    with pytest.raises(Refusal, match="whose weights bound their logits"):
        QKClip(Encoder(), by="weights")


def test_a_call_that_cannot_be_read_later_is_told_and_ends_nothing():
    model = grown(llama)
    clip = QKClip(model, log_only=True)
    model(input_ids=TOKENS)
    attention = model.model.layers[0].self_attn
    nothing = patch.object(type(attention), "forward", lambda self, hidden_states, **rest: (hidden_states, None))
    with nothing, pytest.warns(UserWarning, match="QKClip could not look at"):
        model(input_ids=TOKENS)
    clip.detach()


def test_a_slot_reaches_torchs_fused_encoder_layer():
    model = Encoder().eval()
    with torch.no_grad():
        plain = outputs(model)
        SoftCap(model, cap=0.01)
        assert not torch.allclose(outputs(model), plain, atol=1e-4)


CHANGING = ("soft-cap", "qk-norm rms", "qk-norm l2")


@pytest.mark.parametrize("name", ["gpt2", "llama", "torch"])
@pytest.mark.parametrize("rival", SLOTTED)
@pytest.mark.parametrize("way", ["deepcopy", "file"])
def test_a_copy_computes_with_its_own_weights(rival, name, way, tmp_path):
    model = grown(MODELS[name])
    stabiliser = RIVALS[rival](model)
    before = outputs(model)
    if way == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        torch.save(model, tmp_path / "model.pt")
        twin = torch.load(tmp_path / "model.pt", weights_only=False)
    torch.testing.assert_close(outputs(twin), before)  # torch's kernel, where a loss materialises the original's logits
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.1)
    assert not torch.allclose(outputs(twin), before, atol=1e-4)
    assert torch.equal(outputs(model), before)
    stabiliser.detach()
    assert torch.allclose(outputs(model), before, atol=1e-4) == (rival not in CHANGING)


def test_a_copy_of_a_model_feeds_no_stabiliser_of_the_original():
    model = grown(llama)
    loss, clip = ZLoss(model, weight=1.0), QKClip(model, threshold=1e9)
    outputs(copy.deepcopy(model))
    assert not loss.gathered and not clip.largest
    outputs(model)
    assert loss.gathered and clip.largest


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_slots_are_left_in_any_order_and_twice(order):
    model = grown(llama)
    before, attributes = outputs(model), [sorted(vars(module)) for module in model.modules()]
    attached = [ZLoss(model, weight=0.1), QKNorm(model), QKClip(model, log_only=True)]
    assert not torch.allclose(outputs(model), before, atol=1e-4)
    for number in order:
        attached[number].detach()
        outputs(model)
        attached[number].detach()
    assert torch.equal(outputs(model), before)
    assert [sorted(vars(module)) for module in model.modules()] == attributes


def test_threads_leave_the_kernel_as_it_was():
    kernel = functional.scaled_dot_product_attention
    models = [grown(Encoder) for _ in range(4)]
    attached = [SoftCap(model, cap=0.05) for model in models]
    expected = [outputs(model).detach() for model in models]
    with ThreadPoolExecutor(len(attached)) as pool:
        rounds = [list(pool.map(outputs, models)) for _ in range(10)]
    for outs in rounds:
        assert all(torch.equal(one, two) for one, two in zip(outs, expected, strict=True))
    assert functional.scaled_dot_product_attention is kernel


def test_an_exception_in_attention_leaves_no_interception():
    model = grown(gpt2)
    capped = SoftCap(model, cap=0.05)
    hook = model.transformer.h[1].attn.c_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        outputs(model)
    hook.remove()
    assert not torch.overrides._get_current_function_mode_stack()
    capped.detach()
