"""Kernels by what they are: every published signature against a materialised softmax, text by text."""

import random
import sys

import pytest
import torch
from torch import nn

from kernel_stubs import OPERATORS, TORCH_PACKED, DotProductAttention, define, flash_4, given_of, text_logits, texts
from locater import Live
from locater.attention import materialised
from locater.attention.call_statistics import statistics_of_call
from locater.attention.calls import call_of_softmax
from locater.attention.interception import Interception
from locater.attention.registered import KERNELS
from locater.errors import Refusal
from locater.monitor import AttentionCall, AttentionMonitor, register_kernel
from locater.stabilisers import QKClip

HEADS, KEY_HEADS, SIZE, NEAR = 4, 2, 8, 3
SEEDS = range(12)
OFF = {"float": 0.0, "bool": False, "int": 0}  # what asks for nothing, by type


def numbers(draw, *shape):
    return torch.randn(*shape, generator=draw.torch, dtype=torch.float64)


class Draw(random.Random):
    def __init__(self, seed):
        super().__init__(seed)
        self.torch = torch.Generator().manual_seed(seed)


def options(draw):
    """What any kernel may be asked for."""
    causal = draw.random() < 0.6
    window = draw.choice([(-1, -1), (4, 0 if causal else 2), (-1, 1), (3, -1)])
    return dict(softmax_scale=draw.choice([0.2, 0.5]), window_size_left=window[0], window_size_right=window[1]), causal


def batch(draw):
    q, k = (number for number in draw.choice([(7, 7), (3, 9), (1, 6)]))
    return [numbers(draw, 2, length, heads, SIZE) for length, heads in ((q, HEADS), (k, KEY_HEADS), (k, KEY_HEADS))]


def packed(draw, same=False):
    lengths = [(draw.randint(1, 6), draw.randint(6, 9)) for _ in range(3)]
    lengths = [(b, b) for _, b in lengths] if same else lengths
    ends = [torch.tensor([0, *side]).cumsum(0).int() for side in zip(*lengths, strict=True)]
    sides = [numbers(draw, int(end[-1]), heads, SIZE) for end, heads in zip((*ends, ends[1]), (4, 2, 2), strict=True)]
    return sides, ends


def assert_exact(call, sides, given):
    """Every statistic of every query, text by text, with the sink as one more key that is nowhere."""
    found = statistics_of_call(call, near=NEAR)
    start = 0
    for number, (q, k, _) in enumerate(texts(*sides, given)):
        logits = text_logits(q, k, given, given.get("slopes"))
        distance = (torch.arange(len(q)) + len(k) - len(q))[:, None] - torch.arange(len(k))
        sinks = given.get("sinks")
        if sinks is not None:
            logits = torch.cat([logits, sinks.to(logits)[:, None, None].expand(-1, len(q), 1)], -1)
            distance = torch.cat([distance, torch.full((len(q), 1), 10**6)], -1)
        expected = materialised(logits[None], logits[None] > -torch.inf, distance[None, None], near=NEAR)
        rows = (number, slice(None)) if sides[0].dim() == 4 else (0, slice(start, start + len(q)))
        start += len(q)
        for name in ("entropy", "normalised_entropy", "near_mass", "participation", "max_logit", "num_keys"):
            ours, theirs = getattr(found, name)[rows[0]][:, rows[1]], getattr(expected, name)[0]
            if name == "max_logit" and sinks is not None:
                theirs = logits[..., :-1].amax(-1)
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, equal_nan=True, msg=lambda m, n=name: n + m)


def seen(kernel, *args, **kwargs):
    calls = []
    with Interception(calls.append):
        kernel(*args, **kwargs)
    assert len(calls) == 1
    return calls[0]


@pytest.fixture
def operator(request):
    kernel, library = define(*OPERATORS[request.param])
    yield kernel
    library._destroy()


operators = pytest.mark.parametrize("operator", list(OPERATORS), indirect=True)


@operators
@pytest.mark.parametrize("seed", SEEDS)
def test_operators_are_read_as_they_compute(operator, seed):
    draw = Draw(seed)
    names = [one.name for one in operator.default._schema.arguments]
    arguments, causal = options(draw)
    arguments["causal" if "causal" in names else "is_causal"] = causal
    arguments["softcap" if "softcap" in names else "logits_soft_cap"] = draw.choice([0.0, 2.0])
    if "varlen_" in str(operator) or ("cu_seqlens_q" in names and draw.random() < 0.5):
        sides, (query_ends, key_ends) = packed(draw)
        arguments |= dict(cu_seqlens_q=query_ends, cu_seqlens_k=key_ends, max_seqlen_q=9, max_seqlen_k=9)
    else:
        sides = batch(draw)
        if "seqused_k" in names and draw.random() < 0.7:
            arguments |= cache(draw, sides, in_pages="page_table" in names and draw.random() < 0.5)
    for slopes in {"alibi_slopes", "alibi_slopes_"} & set(names):
        arguments[slopes] = draw.choice([None, torch.tensor([0.5, 0.25, 0.1, 0.0])])
    if "s_aux" in names:
        arguments["s_aux"] = draw.choice([None, torch.tensor([1.0, -1.0, 3.0, 0.0])])
    schema = operator.default._schema.arguments
    missing = [one for one in schema[3:] if one.name not in arguments and not one.has_default_value()]
    arguments |= {one.name: OFF.get(str(one.type)) for one in missing}
    keys = arguments.pop("keys", None)
    sides = sides if keys is None else [sides[0], *keys]
    call = seen(operator, *sides, **arguments)
    assert call.through == "flash_attn"
    assert_exact(call, sides, given_of(arguments))


def cache(draw, sides, *, in_pages):
    """Keys of which each text uses some; in pages of four, mixed."""
    used = torch.tensor([draw.randint(sides[0].shape[1], sides[1].shape[1]) for _ in range(2)]).int()
    if not in_pages:
        return dict(seqused_k=used)
    table = torch.randperm(8, generator=draw.torch).view(2, 4)[:, :3].int()
    return dict(seqused_k=used, page_table=table, keys=[numbers(draw, 8, 4, KEY_HEADS, SIZE) for _ in range(2)])


@pytest.mark.parametrize("seed", SEEDS)
def test_torchs_kernel_for_packed_texts(seed):
    kernel, library = define("torch_attn_stub", TORCH_PACKED)
    draw = Draw(seed)
    sides, ends = packed(draw, same=draw.random() < 0.3)
    arguments = dict(is_causal=draw.random() < 0.5, scale=0.3, window_size=draw.choice([None, [3, 0], [-1, -1]]))
    call = seen(kernel, *sides, *ends, 9, 9, **arguments)
    given = given_of(arguments) | dict(query_ends=ends[0], key_ends=ends[1])
    assert_exact(call, sides, given)
    library._destroy()


@pytest.fixture
def cute():
    module = flash_4()
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


@pytest.mark.parametrize("seed", SEEDS)
def test_flash_4_is_seen_though_it_is_no_operator(cute, seed):
    draw, original = Draw(seed), cute._flash_attn_fwd
    sides, causal = batch(draw), draw.random() < 0.5
    sink = draw.choice([None, torch.tensor([1.0, -1.0, 3.0, 0.0])])
    arguments = dict(softmax_scale=0.3, causal=causal, window_size=draw.choice([(None, None), (3, 0)]), softcap=2.0)
    call = seen(cute.flash_attn_func, *sides, learnable_sink=sink, **arguments)
    assert_exact(call, sides, given_of(arguments) | dict(sinks=sink, window=arguments["window_size"]))
    assert cute._flash_attn_fwd is original and not any("flash" in one.name for one in KERNELS.values())
    with pytest.raises(Refusal, match="arguments of flash_attn that are known, got `mask_mod`; teach it"):
        statistics_of_call(seen(cute.flash_attn_func, *sides, mask_mod=lambda *indices: True))


# ------------------------------------------------------------------------------------------------ in models, unknown
class Own(nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(16, 32), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        sides = [part.unflatten(-1, (-1, SIZE)) for part in (self.q_proj(x), self.k_proj(x), self.v_proj(x))]
        return self.kernel(*sides).flatten(2)


@pytest.mark.parametrize("operator", ["flash 3"], indirect=True)
def test_qk_clip_looks_at_any_kernel(operator):
    model = Own(lambda q, k, v: operator(q, k, v, softmax_scale=0.3, is_causal=True, softcap=5.0)[0])
    holder, x = nn.Sequential(model), torch.randn(2, 7, 16)
    expected = model(x)
    clip = QKClip(holder, heads=[("0.q_proj", "0.k_proj", 4, 2)], log_only=True)
    assert torch.equal(model(x), expected)
    q, k = (part.unflatten(-1, (-1, SIZE)) for part in (model.q_proj(x), model.k_proj(x)))
    logits = torch.stack(
        [text_logits(*pair, dict(scale=0.3, causal=True, softcap=5.0)) for pair in zip(q, k, strict=True)]
    )
    torch.testing.assert_close(next(iter(clip.largest.values())), logits.amax((0, 2, 3)).detach())


UNKNOWN = "attn_of_mine(Tensor q, Tensor k, Tensor v, float sharpness) -> (Tensor, Tensor)"


@pytest.fixture
def unknown():
    library = torch.library.Library("mine", "FRAGMENT")
    library.define(UNKNOWN)

    def forward(q, k, v, sharpness):
        p = (torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) * sharpness).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", p, v.repeat_interleave(2, 2)), torch.zeros(())

    library.impl("attn_of_mine", forward, "CompositeImplicitAutograd")
    yield torch.ops.mine.attn_of_mine
    KERNELS.pop(torch.ops.mine.attn_of_mine, None)
    library._destroy()


def test_an_unknown_kernel_is_named_with_its_arguments_and_can_be_taught(unknown):
    model, x = nn.Sequential(Own(lambda q, k, v: unknown(q, k, v, 0.3)[0])), torch.randn(2, 7, 16)
    heads = [("0.q_proj", "0.k_proj", 4, 2)]
    with AttentionMonitor(Live(model, heads=heads, causal=False), every=1) as monitor:
        model(x)
        report = monitor.report()
    assert "the operator mine::attn_of_mine(q, k, v, sharpness); teach it by" in " ".join(report.notes)

    def read(given):
        sides = (given[name].transpose(1, 2) for name in "qkv")
        return AttentionCall(*sides, scale=given["sharpness"], tokens_first=True, through="mine")

    assert register_kernel(unknown, read) is unknown
    with AttentionMonitor(Live(model, heads=heads), every=1) as monitor:
        model(x)
        (layer,) = monitor.report().training
    assert layer.through == "mine"
    assert layer.statistics["entropy"] == pytest.approx(entropies(model[0], x))


@pytest.mark.parametrize(
    "signature",
    [
        "attention(Tensor q, Tensor k, Tensor v, bool causal, float scale, int window_size_left=-1) -> Tensor",
        "my_attn(Tensor query, Tensor key, Tensor value, bool is_causal, float softmax_scale) -> Tensor",
    ],
)
def test_heads_before_tokens_are_not_guessed(signature):
    """Arguments as flash-attention's, but another name: which of tokens and heads comes first cannot be known."""
    library = torch.library.Library("other", "FRAGMENT")
    library.define(signature)
    name = signature.partition("(")[0]
    library.impl(name, lambda q, k, v, *rest: v.clone(), "CompositeImplicitAutograd")
    sides = [torch.randn(1, 2, 5, SIZE) for _ in range(3)]
    call = seen(getattr(torch.ops.other, name), *sides, True, 0.3)
    with pytest.raises(Refusal, match=rf"the operator other::{name}\("):
        statistics_of_call(call)
    library._destroy()


def entropies(model, x):
    q, k = (part.unflatten(-1, (-1, SIZE)) for part in (model.q_proj(x), model.k_proj(x)))
    p = torch.stack([text_logits(*pair, dict(scale=0.3)) for pair in zip(q, k, strict=True)]).softmax(-1)
    return torch.special.entr(p).sum(-1).mean((0, 2)).tolist()


def test_a_python_function_can_be_taught():
    def kernel(q, k, v, sharpness=0.3):
        p = (torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) * sharpness).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", p, v.repeat_interleave(2, 2))

    def read(given):
        sides = (given[name].transpose(1, 2) for name in "qkv")
        return AttentionCall(*sides, scale=given["sharpness"], tokens_first=True, through="mine")

    visible = register_kernel(kernel, read)
    model, x = nn.Sequential(Own(visible)), torch.randn(2, 7, 16)
    with AttentionMonitor(Live(model, heads=[("0.q_proj", "0.k_proj", 4, 2)]), every=1) as monitor:
        model(x)
        (layer,) = monitor.report().training
    KERNELS.pop(visible)
    assert layer.through == "mine"
    assert layer.statistics["entropy"] == pytest.approx(entropies(model[0], x))
    with pytest.raises(Refusal, match="an operator of torch.ops or a Python function"):
        register_kernel(3, read)


# ------------------------------------------------------------------------------------------------- Transformer Engine
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_transformer_engine(layout, seed):
    draw = Draw(seed)
    kind = draw.choice(["no_mask", "causal", "causal_bottom_right"])
    kind = {"no_mask": "padding"}.get(kind, f"padding_{kind}") if layout == "thd" else kind
    window = draw.choice([(-1, -1), (3, 0 if "causal" in kind else 2)])
    sink = draw.choice([None, torch.tensor([1.0, -1.0, 3.0, 0.0]).view(1, 4, 1, 1)])
    module = DotProductAttention(
        qkv_format=layout, attn_mask_type=kind, window_size=window, scale=draw.choice([None, 0.2]), offset=sink
    )
    is_square = kind in ("causal", "padding_causal")
    if layout == "thd":
        sides, ends = packed(draw, same=is_square)
        if is_square:
            ends = [ends[1], ends[1]]
        call = seen(module, *sides, cu_seqlens_q=ends[0], cu_seqlens_kv=ends[1])
        assert_exact(call, sides, module.given(*ends))
        return
    sides = batch(draw)
    sides = [sides[0], *(one[:, : sides[0].shape[1]] for one in sides[1:])] if is_square else sides
    given = [side.transpose(0, 1) for side in sides] if layout == "sbhd" else sides
    assert_exact(seen(module, *given), sides, module.given())


def test_masks_and_biases_of_transformer_engine():
    draw = Draw(0)
    q, k, v = (numbers(draw, 2, 5, heads, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    module = DotProductAttention(qkv_format="bshd", attn_mask_type="arbitrary")
    hidden = torch.rand(2, 1, 5, 5, generator=draw.torch) < 0.3
    assert torch.equal(seen(module, q, k, v, attention_mask=hidden).admitted().expand(2, 1, 5, 5), ~hidden)
    module.attn_mask_type = "padding"
    padded = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]).bool().view(2, 1, 1, 5)
    assert torch.equal(seen(module, q, k, v, attention_mask=padded).admitted().expand(2, 1, 5, 5)[:, :, :1], ~padded)
    module.attn_mask_type, bias = "causal", numbers(draw, 1, HEADS, 5, 5)
    call = seen(module, q, k, v, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) * SIZE**-0.5 + bias
    expected = logits.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(statistics_of_call(call).entropy, torch.special.entr(expected).sum(-1))
    for name, value in (("inference_params", object()), ("core_attention_bias_type", "other")):
        with pytest.raises(Refusal, match=f"`{name if value != 'other' else value}`"):
            statistics_of_call(seen(module, q, k, v, **{name: value}))
    module.cp_group = object()
    with pytest.raises(Refusal, match="context parallel"):
        statistics_of_call(seen(module, q, k, v))
    assert DotProductAttention.forward not in KERNELS, "taken out again"


# ------------------------------------------------------------------------------------------------------- transformers
def by_hand(module, query, key, value, attention_mask, scaling=None, dropout=0.0, *, hides=True, **kwargs):
    """No kernel and no softmax of torch: all that can be seen is what goes in and what comes out."""
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    weights = (query @ key.mT * scaling).exp()
    weights = weights.tril() if hides else weights
    return (weights / weights.sum(-1, keepdim=True) @ value).transpose(1, 2), None


def blind(*args, **kwargs):
    return by_hand(*args, hides=False, **kwargs)


def fused(module, query, key, value, attention_mask, scaling=None, **kwargs):
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2), None


@pytest.mark.parametrize("function", [by_hand, blind, fused])
def test_functions_that_were_registered_in_transformers_are_the_last_resort(function):
    transformers = pytest.importorskip("transformers")
    transformers.AttentionInterface.register("of_mine", function)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, intermediate_size=32,
        vocab_size=50,
    )  # fmt: skip
    tokens, reports = torch.randint(0, 50, (2, 9)), []
    for name in ("of_mine", "sdpa"):
        config._attn_implementation = name
        torch.manual_seed(1)
        model = transformers.LlamaModel(config)
        with AttentionMonitor(model, every=1) as monitor, torch.no_grad():
            model(tokens)
            reports.append(monitor.report())
        assert transformers.AttentionInterface._global_mapping["of_mine"] is function, "taken out again"
    ours, theirs = reports
    if function is blind:
        assert all(layer.through == "module inputs" for layer in ours.no_grad)
        assert "an attention function whose output its arguments tell" in " ".join(ours.notes)
        assert "teach it by locater.monitor.register_kernel" in " ".join(ours.notes)
        return
    through = {by_hand: "by_hand", fused: "scaled_dot_product_attention"}[function]
    assert not ours.notes and {layer.through for layer in ours.no_grad} == {through}
    for layer, other in zip(ours.no_grad, theirs.no_grad, strict=True):
        for name, values in other.statistics.items():
            assert layer.statistics[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name
        assert layer.num_passes == other.num_passes == 1


def test_qk_clip_and_the_monitor_both_see_the_last_resort():
    transformers = pytest.importorskip("transformers")
    transformers.AttentionInterface.register("of_mine", by_hand)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=32, vocab_size=50,
        attn_implementation="of_mine",
    )  # fmt: skip
    model, tokens = transformers.LlamaModel(config), torch.randint(0, 50, (2, 9))
    clip = QKClip(model, threshold=1e-6)
    with AttentionMonitor(model, every=1) as monitor:
        model(tokens).last_hidden_state.sum().backward()
        clip.step()
        report = monitor.step()
    found = clip.metrics(heads=True)
    for layer in report.training:
        assert layer.through == "by_hand" and layer.num_passes == 1
        seen_by_clip = [found[f"qk/layer_{layer.layer:02}/head_{head:02}/max_logit"] for head in layer.heads]
        assert seen_by_clip == pytest.approx(layer.statistics["max_logit"], rel=1e-5)
    clip.detach()


def test_logits_of_a_written_out_softmax_may_be_spread_over_processes():
    """QK-Clip takes the largest of each process's own heads; the statistics are of all heads."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from locater.stabilisers.qk_clip import largest_logits

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        logits = torch.randn(2, 4, 8, 8)
        spread = DTensor.from_local(logits, init_device_mesh("cpu", (1,)), [Shard(1)])
        found, expected = (statistics_of_call(call_of_softmax(one)) for one in (spread, logits))
        assert torch.equal(found.entropy, expected.entropy)
        largest = largest_logits(call_of_softmax(spread))
        assert isinstance(largest, DTensor) and torch.equal(largest.to_local(), logits.amax((0, 2, 3)))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("cast", [False, True], ids=["as it is", "autocast"])
def test_products_of_16_bits_are_summed_in_32(cast):
    query, key = (torch.full((1, 1, 2, 16), 300.0, dtype=torch.float16) for _ in range(2))  # 1,440,000 before the scale
    call = AttentionCall(query, key, key, scale=1e-4)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        logits = call.raw()
    torch.testing.assert_close(logits, torch.full((1, 1, 2, 2), 144.0), rtol=1e-6, atol=0)
