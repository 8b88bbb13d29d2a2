"""Kernels × ways of running × tools: every number right, or one refusal at the start that names the way out."""

import copy
import sys
import types
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kernel_stubs import FLASH_2, FLASH_2_PACKED, FLASH_3
from locater import Live
from locater.errors import Refusal
from locater.monitor import AttentionMonitor
from locater.stabilisers import LocAteR, QKClip, QKNorm

D, HEADS, SIZE, TEXTS, TOKENS = 32, 4, 8, 2, 7
LARGE = 6.0  # so that logits differ


# ---------------------------------------------------------------------------------------------------------- kernels
def causal(q, k, v, labels=None):
    """(texts, heads, tokens, size), materialised; only pairs of one label see each other."""
    logits = q @ k.mT * SIZE**-0.5
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    hidden = hidden if labels is None else hidden | (labels[:, None] != labels)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def sdpa(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def flex(q, k, v):
    from torch.nn.attention.flex_attention import flex_attention

    def past(score, text, head, query, key):
        return torch.where(query >= key, score, -torch.inf)

    # It has no gradients on a CPU: what is given to it has none.
    return flex_attention(*(part.detach() for part in (q, k, v)), score_mod=past) + 0 * v


def eager(q, k, v):
    return causal(q, k, v)


def tokens_first(kernel):
    def call(q, k, v):
        return kernel(*(part.transpose(1, 2) for part in (q, k, v))).transpose(1, 2)

    return call


def in_one(kernel):
    """All texts one behind the other."""

    def call(q, k, v):
        ends = torch.arange(0, len(q) * q.shape[2] + 1, q.shape[2], dtype=torch.int32)
        flat = [part.transpose(1, 2).flatten(0, 1) for part in (q, k, v)]
        return kernel(*flat, ends).unflatten(0, (len(q), -1)).transpose(1, 2)

    return call


@pytest.fixture(scope="module")
def kernels():
    """By name; stubs of kernels that need a GPU, in terms that a compiler can trace."""
    kept = []

    def operator(namespace, signature):
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(signature)
        name = signature.partition("(")[0]

        def forward(q, k, v, *args, cu_seqlens_q=None, **kwargs):
            if q.dim() == 4:
                return causal(*(part.transpose(1, 2) for part in (q, k, v))).transpose(1, 2), q.new_zeros(())
            ends = args[0] if args else cu_seqlens_q
            labels = torch.bucketize(torch.arange(len(q)), ends[1:].long(), right=True)
            sides = (part.transpose(0, 1) for part in (q, k, v))
            return causal(*sides, labels=labels).transpose(0, 1), q.new_zeros(())

        library.impl(name, forward, "CompositeImplicitAutograd")
        kept.append(library)
        return getattr(getattr(torch.ops, namespace), name)

    second = operator("stacks_2", FLASH_2)
    packed = operator("stacks_2", FLASH_2_PACKED)
    third = operator("stacks_3", FLASH_3.format(name="fwd", causal="is_causal", more=""))
    fourth = types.ModuleType("flash_attn_of_stacks")
    vars(fourth)["computed"] = tokens_first(causal)
    exec(
        "def _flash_attn_fwd(q, k, v, softmax_scale=None, causal=False, softcap=None, window_size_left=None):\n"
        "    return computed(q, k, v)\n"
        "def flash_attn_func(q, k, v):\n"
        "    return _flash_attn_fwd(q, k, v, causal=True)\n",
        vars(fourth),
    )
    sys.modules[fourth.__name__] = fourth
    yield {
        "sdpa": sdpa,
        "flex": flex,
        "flash 2": tokens_first(lambda q, k, v: second(q, k, v, 0.0, SIZE**-0.5, True, -1, -1, 0.0, None, False)[0]),
        "flash 3": tokens_first(lambda q, k, v: third(q, k, v, softmax_scale=SIZE**-0.5, is_causal=True)[0]),
        "flash 4": tokens_first(lambda q, k, v: fourth.flash_attn_func(q, k, v)),
        "varlen": in_one(lambda q, k, v, ends: packed(q, k, v, ends, ends, 7, 7, 0.0, SIZE**-0.5, True)[0]),
        "mha": None,
        "eager": eager,
    }
    del sys.modules[fourth.__name__]


# ----------------------------------------------------------------------------------------------------------- models
class Attention(nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(D, D, bias=False) for _ in range(3))

    def heads(self, x):
        return [one(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj)]

    def forward(self, x):
        return self.kernel(*self.heads(x)).transpose(1, 2).flatten(2)


class MultiHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(D, HEADS, bias=False, batch_first=True)

    def heads(self, x):
        sides = functional.linear(x, self.inner.in_proj_weight).chunk(3, -1)
        return [side.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for side in sides]

    def forward(self, x):
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.inner(x, x, x, attn_mask=hidden, need_weights=False)[0]


class Model(nn.Module):
    def __init__(self, kernel, *, is_recomputed=False):
        super().__init__()
        self.layers = nn.ModuleList(MultiHead() if kernel is None else Attention(kernel) for _ in range(2))
        self.is_recomputed = is_recomputed
        with torch.no_grad():
            for name, weight in self.named_parameters():
                weight.mul_(LARGE if "proj" in name else 1.0)

    def forward(self, x):
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.is_recomputed else layer(x))
        return x

    @property
    def named(self):
        if isinstance(self.layers[0], MultiHead):
            return []
        return [(f"layers.{n}.q_proj", f"layers.{n}.k_proj", HEADS, HEADS) for n in range(2)]

    @torch.no_grad()
    def expected(self, x, norm=None):
        """Each layer's largest logit and mean entropy per head, and the output; `norm` on queries and keys."""
        layers = []
        for layer in self.layers:
            q, k, v = layer.heads(x)
            q, k = (part if norm is None else norm(part) for part in (q, k))
            logits = q @ k.mT * SIZE**-0.5
            logits = logits.masked_fill(torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), -torch.inf)
            p = logits.softmax(-1)
            rows = -(p * p.clamp(min=1e-30).log()).sum(-1)
            layers.append((logits.amax((0, 2, 3)), rows.mean((0, 2))))
            y = (p @ v).transpose(1, 2).flatten(2)
            x = x + (layer.inner.out_proj(y) if isinstance(layer, MultiHead) else y)
        return layers, x


KERNELS = ["sdpa", "flex", "flash 2", "flash 3", "flash 4", "varlen", "mha", "eager"]
WAYS = ["plain", "inner", "outer", "block", "checkpointed", "no_grad"]
COMPILE = dict(fullgraph=True, backend="eager")


def ready(kernel, way):
    """The model, what the tool is attached to, and what is called."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Model(kernel, is_recomputed=way == "checkpointed")
    if way == "block":
        for layer in model.layers:
            layer.compile(**COMPILE)
    compiled = torch.compile(model, **COMPILE) if way in ("inner", "outer") else model
    return model, compiled if way == "outer" else model, compiled


def run(called, way):
    """One training step's passes, and the texts of the one that counts."""
    x = torch.randn(TEXTS, TOKENS, D)
    if way == "no_grad":
        with torch.no_grad():
            called(30 * torch.randn(TEXTS, TOKENS, D))
    called(x).square().mean().backward()
    return x


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KERNELS)
def test_the_monitor_is_right_or_says_that_it_was_not_looking(name, way, kernels):
    model, attached, called = ready(kernels[name], way)
    with AttentionMonitor(Live(attached, heads=model.named, causal=True), every=1) as monitor:
        for _ in range(2):
            x = run(called, way)
            report = monitor.step()
            if way == "inner":
                assert "attach to what torch.compile returned" in " ".join(report.notes)
                assert not report.training
                continue
            layers = model.expected(x)[0]
            for layer, (largest, entropy) in zip(report.training, layers, strict=True):
                torch.testing.assert_close(torch.tensor(layer.statistics["max_logit"]), largest, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(torch.tensor(layer.statistics["entropy"]), entropy, rtol=1e-5, atol=1e-5)
    run(called, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KERNELS)
def test_qk_clip_is_right_or_says_that_it_was_not_looking(name, way, kernels):
    model, attached, called = ready(kernels[name], way)
    clip = QKClip(attached, threshold=1.0, heads=model.named)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            x = run(called, way)
            before = model.expected(x)[0]
            clip.step()
            if way == "inner":
                continue
            found = clip.metrics(heads=True)
            values = [[found[f"qk/layer_{n:02}/head_{h:02}/max_logit"] for h in range(HEADS)] for n in range(2)]
            largest = torch.stack([one for one, _ in before])
            torch.testing.assert_close(torch.tensor(values), largest, rtol=1e-5, atol=1e-5)
            after = model.expected(x)[0]
            torch.testing.assert_close(after[0][0], largest[0].clamp(max=1.0), rtol=1e-4, atol=1e-5)
    words = " ".join(str(one.message) for one in told)
    assert ("attach to what torch.compile returned" in words) == (way == "inner"), words
    clip.detach()
    run(called, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KERNELS)
def test_qk_norm_is_right_or_refused_at_the_start(name, way, kernels):
    model, attached, called = ready(kernels[name], way)
    if way in ("outer", "block"):
        with pytest.raises(Refusal, match="compile without fullgraph=True"):
            QKNorm(attached, heads=model.named)
        run(called, way)
        return
    norm = QKNorm(attached, heads=model.named)
    replaced = name in ("sdpa", "mha")
    if way == "inner" or not replaced:
        words = "compile without fullgraph=True" if way == "inner" else "scaled_dot_product_attention"
        with pytest.raises(Exception, match=words):
            run(called, way)
    else:
        x = run(called, way)
        normed = nn.RMSNorm(SIZE, eps=1e-6)
        with torch.no_grad():
            torch.testing.assert_close(called(x), model.expected(x, normed)[1], rtol=1e-5, atol=5e-5)
    norm.detach()
    run(called, way)


class Kernel(nn.Module):
    def forward(self, q, k, v):
        return sdpa(q, k, v)


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.wqkv = nn.Linear(D, 3 * D, bias=False)

    def forward(self, x):
        return [part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in self.wqkv(x).chunk(3, -1)]


class Apart(nn.Module):
    """Queries and keys in one module, the kernel in another beside it, as torchtitan 0.3 has it."""

    def __init__(self):
        super().__init__()
        self.qkv_linear, self.inner_attention = Projections(), Kernel()

    def forward(self, x):
        return self.inner_attention(*self.heads(x)).transpose(1, 2).flatten(2)

    def heads(self, x):
        return self.qkv_linear(x)


@pytest.mark.parametrize("way", ["plain", "block", "wrapped"])
def test_projections_and_kernel_in_modules_of_their_own(way):
    model, attached, called = ready(sdpa, "plain")
    model.layers = nn.ModuleList(Apart() for _ in range(2))
    with torch.no_grad():
        [layer.qkv_linear.wqkv.weight.mul_(LARGE) for layer in model.layers]
    for layer in model.layers if way == "block" else ():
        layer.compile(**COMPILE)
    expected = copy.deepcopy(model)
    if way == "wrapped":
        model.layers = nn.ModuleList(map(checkpoint_wrapper, model.layers))
    clip = QKClip(attached, threshold=1.0)  # finds its heads in the first pass
    x = run(called, way)
    clip.step()
    found = clip.metrics(heads=True)
    values = [[found[f"qk/layer_{n:02}/head_{h:02}/max_logit"] for h in range(HEADS)] for n in range(2)]
    largest = torch.stack([one for one, _ in expected.expected(x)[0]])
    torch.testing.assert_close(torch.tensor(values), largest, rtol=1e-5, atol=1e-5)
    clip.detach()


class InOne(nn.Module):
    """Two layers in one `forward`: which call is whose is not known."""

    def __init__(self):
        super().__init__()
        self.q0, self.k0, self.v0, self.q1, self.k1, self.v1 = (nn.Linear(D, D, bias=False) for _ in range(6))

    def forward(self, x):
        for sides in ((self.q0, self.k0, self.v0), (self.q1, self.k1, self.v1)):
            q, k, v = (side(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for side in sides)
            x = x + sdpa(q, k, v).transpose(1, 2).flatten(2)
        return x


def test_two_attentions_in_one_module_are_refused_by_what_looks_at_calls():
    sample = (torch.randn(TEXTS, TOKENS, D),)
    for stabiliser in (QKClip, QKNorm):
        with pytest.raises(Refusal, match="a module of its own for each attention.*layer 0.*layer 1"):
            stabiliser(InOne(), sample=sample)
    assert len(LocAteR(InOne(), strength=0.1, sample=sample).pairs) == 2
