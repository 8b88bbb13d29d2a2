"""Latent attention: LocAteR and QK-Clip on the products of tiny models, against heads written out in full."""

import pytest
import torch
import transformers as hf

from locater import heads
from locater.spectra import moments
from locater.stabilisers import LocAteR, Penalised, Projected, QKClip, SoftCap, ZLoss

pytestmark = pytest.mark.quick

SIZES = dict(
    vocab_size=64,
    hidden_size=48,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    first_k_dense_replace=2,
    max_position_embeddings=32,
)
TOKENS = torch.arange(20).reshape(2, 10) % 64


EXPERTS = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1)
GLM = dict(mlp_layer_types=["dense"] * 2)
# The last two are of no table: that they read as DeepSeek does is proven on first use.
KINDS = {
    "v2 direct": ("DeepseekV2", dict(q_lora_rank=None, n_routed_experts=4)),
    "v2": ("DeepseekV2", dict(q_lora_rank=16, n_routed_experts=4)),
    "v3": ("DeepseekV3", dict(q_lora_rank=16) | EXPERTS),
    "glm4_moe_lite": ("Glm4MoeLite", dict(q_lora_rank=16) | EXPERTS | GLM),
    "youtu": ("Youtu", dict(q_lora_rank=16)),
}


def make(name: str):
    torch.manual_seed(0)
    prefix, changed = KINDS[name]
    model = getattr(hf, f"{prefix}ForCausalLM")(getattr(hf, f"{prefix}Config")(**SIZES | changed))
    with torch.no_grad():
        for one in model.parameters():
            one.add_(0.2 * torch.randn_like(one))
    return model


def factors(model, layer: int):
    """W_Q and W_K of every head of a layer, by hand, differentiable."""
    own = model.model.layers[layer].self_attn
    if getattr(own, "q_proj", None) is not None:
        query = own.q_proj.weight.unflatten(0, (4, 12))
    else:
        query = (own.q_b_proj.weight * own.q_a_layernorm.weight @ own.q_a_proj.weight).unflatten(0, (4, 12))
    down, rope = own.kv_a_proj_with_mqa.weight.split([12, 4])
    nope = own.kv_b_proj.weight.unflatten(0, (4, 14))[:, :8] * own.kv_a_layernorm.weight @ down
    return query, torch.cat([nope, rope.expand(4, -1, -1)], 1)


def dense(model) -> torch.Tensor:
    """Σ (tr W² + 2‖W‖²)/3 with every d×d matrix written out."""
    total = torch.zeros(())
    for layer in range(2):
        query, key = factors(model, layer)
        full = key.mT @ query
        total = total + ((full * full.mT).sum() + 2 * full.square().sum()) / 3
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_the_penalty_is_the_dense_sum_and_so_is_its_gradient(kind):
    model = make(kind)
    locater = LocAteR(model, strength=0.5)
    assert len(locater.pairs) == 2
    expected = 0.5 * dense(model)
    torch.testing.assert_close(locater.penalty(), expected, rtol=1e-5, atol=0)
    named = dict(model.named_parameters())
    wanted = torch.autograd.grad(expected, list(named.values()), allow_unused=True)
    found = torch.autograd.grad(locater.penalty(), list(named.values()), allow_unused=True)
    touched = 0
    for name, ours, theirs in zip(named, found, wanted, strict=True):
        assert (ours is None) == (theirs is None), name
        if theirs is not None:
            touched += 1
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))
    assert touched == (12 if kind != "v2 direct" else 8)
    # and it is the W that a scan reads
    read = [one for layer in range(2) for one in heads(model) if one.layer == layer]
    etas = sum(float(moments(one.query.weight, one.key.weight).eta.detach()) ** 2 for one in read)
    assert float(locater.penalty().detach()) == pytest.approx(0.5 * etas, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_decoupled_step_shrinks_every_head(kind, optimizer):
    model = make(kind)
    steps = optimizer(model.parameters(), lr=1e-4)
    locater = LocAteR(model, strength=1e-2, optimizer=steps, mean=Penalised(0.0))
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    steps.step()
    steps.zero_grad()
    before = {name: value for name, value in locater.metrics(heads=True).items() if name.endswith("eta")}
    locater.step()
    after = locater.metrics(heads=True)
    assert all(after[name] < value for name, value in before.items())


def test_the_strength_is_chosen_for_products_too():
    model = make("v3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    locater = LocAteR(model, strength="auto")
    for _ in range(2):
        (model(input_ids=TOKENS, labels=TOKENS).loss + locater.penalty()).backward()
        optimizer.step()
        locater.step()
        optimizer.zero_grad()
    assert locater.strength > 0


def test_products_cannot_be_projected():
    locater = LocAteR(make("v3"), strength=0.0, mean=Projected())
    locater.penalty()
    with pytest.raises(ValueError, match="plain parameters to project"):
        locater.step()


def logits_of(model, layer: int = 0) -> torch.Tensor:
    """The logits of the real call, before any mask."""
    seen: list[torch.Tensor] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def note(query, key, value, **options):
        seen.append(query @ key.mT * (options.get("scale") or query.shape[-1] ** -0.5))
        return real(query, key, value, **options)

    with pytest.MonkeyPatch.context() as patched, torch.no_grad():
        patched.setattr(torch.nn.functional, "scaled_dot_product_attention", note)
        model(input_ids=TOKENS)
    return seen[layer]


@pytest.mark.parametrize("kind", KINDS)
def test_qk_clip_scales_every_logit_of_a_head_by_its_factor(kind):
    model = make(kind)
    before = logits_of(model)
    causal = torch.ones(10, 10, dtype=torch.bool).tril()
    largest = before.where(causal, -torch.inf).amax((0, 2, 3))
    threshold = float(largest.sort().values[1:3].mean())  # two heads above it, two below
    clip = QKClip(model, threshold=threshold)
    model(input_ids=TOKENS)
    rope = model.model.layers[0].self_attn.kv_a_proj_with_mqa.weight.clone()
    clip.step()
    clip.detach()
    factors = (threshold / largest).clamp(max=1.0)
    assert int((factors < 1).sum()) == 2
    torch.testing.assert_close(logits_of(model), before * factors[:, None, None], rtol=1e-4, atol=1e-5)
    assert torch.equal(rope, model.model.layers[0].self_attn.kv_a_proj_with_mqa.weight)  # shared by all heads


def test_slots_see_latent_attention():
    model = make("v3")
    with torch.no_grad():
        plain = model(input_ids=TOKENS).logits
        cap = SoftCap(model, cap=0.5)
        assert not torch.allclose(model(input_ids=TOKENS).logits, plain)
        cap.detach()
        assert torch.equal(model(input_ids=TOKENS).logits, plain)
    loss = ZLoss(model, weight=1.0)
    model(input_ids=TOKENS)
    assert float(loss.penalty().detach()) > 0
    loss.detach()
