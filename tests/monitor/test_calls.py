"""The kernel's own arguments: every statistic against a materialised softmax inside the model, known to us or not."""

import pytest
import test_monitor
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from locater import Live
from locater.attention import materialised
from locater.errors import Refusal
from locater.monitor import AttentionMonitor, Scope
from written_models import KINDS, Cross, Einsum, Fused, Net, Packed, Separate, WithoutSoftmax, WithWeights

TOKENS = torch.randint(0, 50, (3, 24), generator=torch.Generator().manual_seed(1))


def expected(logits, *, near, first=None):
    num_queries, num_keys = logits.shape[-2:]
    distance = torch.arange(num_queries)[:, None] - torch.arange(num_keys)
    return materialised(logits.double(), logits > -torch.inf, distance[None, None], near=near, sink=first)


def assert_exact(layer, logits, *, first=None, near=4):
    """Every head of a layer, to 1e-5."""
    for name, numbers in expected(logits, near=near, first=first).numbers():
        if name in layer.statistics:
            theirs = numbers.amax((0, 2)) if name == "max_logit" else numbers.nanmean((0, 2))
            size = logits.shape[-1] if name in ("mean_distance", "participation") else 1
            ours = torch.tensor(layer.statistics[name], dtype=torch.float64)
            torch.testing.assert_close(
                ours / size, theirs / size, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


def watched(model):
    with AttentionMonitor(model, every=1, scope=Scope(near=4)) as monitor:
        (model.module if isinstance(model, Live) else model)(TOKENS)
        return monitor.report()


@pytest.mark.parametrize("kind", [*KINDS, WithWeights], ids=lambda kind: kind.__name__)
def test_every_way_of_writing_attention_is_read_exactly(kind):
    model = Net(kind)
    report = watched(model)
    assert len(report.training) == 2
    assert all(note.startswith("nothing is said of the weights") for note in report.notes)
    half = TOKENS.shape[1] // 2
    first = (torch.arange(24) // half * half).expand(1, 1, -1) if kind is Packed else None
    for layer, block in zip(report.training, model.blocks, strict=True):
        assert layer.block == ("cross" if kind is Cross else layer.block)
        assert layer.through == ("softmax" if kind is WithWeights else "scaled_dot_product_attention")
        assert_exact(layer, block.attn.kept, first=first)
        assert layer.ranks["residual"] > 0


class ByMethod(nn.Module):
    """A block that calls attention by a method of its own, as scripts do."""

    def __init__(self, by):
        super().__init__()
        self.norm, self.qkv, self.by = nn.LayerNorm(16), nn.Linear(16, 48), by

    def attend(self, x):
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def within(self, x, attend):
        return x + attend(self.norm(x))

    def forward(self, x):
        return WAYS[self.by](self, x)


WAYS = {
    "its forward": lambda block, x: x + block.attend(x),
    "a method of a normed input": lambda block, x: block.within(x, block.attend),
    "a method with other names": lambda block, x: block.within(attend=lambda y: block.attend(y), x=x),
    "a function of the module": lambda block, x: torch.utils.checkpoint.checkpoint(
        block.attend, x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("by", WAYS)
def test_a_layers_input_is_known_however_its_forward_calls_attention(by):
    """Else there were no residual, and no alarm of rank collapse, without a word."""
    torch.manual_seed(0)
    model = nn.Sequential(ByMethod(by), ByMethod(by))
    with AttentionMonitor(model, every=1) as monitor:
        x = torch.randn(2, 9, 16)
        model(x)
        first, second = monitor.report().training
    assert first.ranks["residual"] == pytest.approx(float((x - x.mean(1, True)).norm() / x.norm()), abs=0.02)
    assert second.ranks["residual"] > 0


def test_projections_named_by_hand_are_read_from_the_call_as_well():
    model = Net(Separate)
    for layer, block in zip(watched(Live(model, heads=NAMES)).training, model.blocks, strict=True):
        assert_exact(layer, block.attn.kept)


NAMES = [(f"blocks.{n}.attn.q_proj", f"blocks.{n}.attn.k_proj", 4, 4) for n in range(2)]


@pytest.mark.parametrize("kind", [Einsum, WithoutSoftmax])
def test_attention_that_calls_no_kernel_is_refused_by_name(kind):
    own = ", but a softmax of its own in `blocks.0.attn` .Einsum., `blocks.1.attn` .Einsum." if kind is Einsum else ""
    with pytest.raises(Refusal, match=f"neither in Net{own}; name its projections"):
        watched(Net(kind))


def test_attention_written_out_is_read_from_its_softmax_once_its_module_is_known():
    model = Net(Einsum)
    report = watched(Live(model, heads=NAMES))
    for layer, block in zip(report.training, model.blocks, strict=True):
        assert layer.through == "softmax"
        assert_exact(layer, block.attn.kept)


def test_what_calls_nothing_at_all_is_reconstructed_and_its_causality_asked_for():
    model = Net(WithoutSoftmax)
    report = watched(Live(model, heads=NAMES))
    assert not report.training and "blocks.0.attn.q_proj" in report.notes[0] and "causal=True" in report.notes[0]
    report = watched(Live(model, heads=NAMES, causal=True))
    assert "layers 0-1 called no attention kernel: reconstructed" in report.notes[0]
    for layer, block in zip(report.training, model.blocks, strict=True):
        assert layer.through == "module inputs"
        assert_exact(layer, block.attn.kept)
    wrong = watched(Live(model, heads=NAMES, causal=False)).training[0].statistics["entropy"]
    assert wrong != pytest.approx(report.training[0].statistics["entropy"], abs=1e-2)


def test_a_module_that_looks_like_attention_and_calls_nothing_is_named():
    class LinearAttention(nn.Linear):
        pass

    model = Net(Fused)
    model.blocks[1].attn = LinearAttention(32, 32)
    report = watched(model)
    assert len(report.training) == 1 and "`blocks.1.attn` (LinearAttention) looks like attention" in report.notes[0]


def test_adapters_of_peft_are_read_with_what_they_add():
    """LoRA on queries and keys of a model of one's own, and of a known family, merged into the weights or not."""
    model = Net(Separate)
    tuned = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False))
    report = watched(tuned)
    for layer, block in zip(report.training, model.blocks, strict=True):
        assert_exact(layer, block.attn.kept)
    assert_exact(watched(model).training[0], model.blocks[0].attn.kept)


def test_adapters_of_peft_on_a_known_family():
    llama = test_monitor.llama().eval()
    tuned = get_peft_model(llama, LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)).eval()
    found = test_monitor.watch(tuned, lambda: tuned(test_monitor.TOKENS))
    merged = tuned.merge_and_unload().eval()
    expected = test_monitor.watch(merged, lambda: merged(test_monitor.TOKENS))
    ours, theirs = (test_monitor.seen(report, evaluation=True) for report in (found, expected))
    test_monitor.same(ours, theirs, 1e-4)


class Flex(Separate):
    """FlexAttention with a rule and a change of scores that close over tensors of the model."""

    def forward(self, x):
        q, k, v = self.make(x)
        length, slope = x.shape[1], torch.arange(1.0, 5.0) / 10

        def score(logit, batch, head, query, key):
            return 8 * torch.tanh(logit / 8) - slope[head] * (query - key)

        def rule(batch, head, query, key):
            return (query >= key) & (query - key < 9)

        mask = create_block_mask(rule, None, None, length, length, device="cpu")
        distance = torch.arange(length)[:, None] - torch.arange(length)
        logits = 8 * torch.tanh(q @ k.mT / 8**0.5 / 8) - slope[:, None, None] * distance
        self.kept = logits.masked_fill((distance < 0) | (distance >= 9), -torch.inf).detach()
        return flex_attention(q, k, v, score_mod=score, block_mask=mask).transpose(1, 2).flatten(2)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_is_read_with_its_rule_and_its_scores():
    model = Net(Flex).requires_grad_(False)
    report = watched(model)
    for layer, block in zip(report.training, model.blocks, strict=True):
        assert layer.through == "flex_attention"
        assert_exact(layer, block.attn.kept)


@pytest.fixture
def flash_operator():
    """flash-attn's operator by its name and arguments, computed by plain products: its package has no CPU build."""
    library = torch.library.Library("flash_attn", "DEF")
    library.define(
        "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, "
        "int window_size_left, int window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax) "
        "-> Tensor"
    )

    def forward(q, k, v, dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, return_softmax):
        logits = flash_logits(q, k, softmax_scale, left, softcap, alibi_slopes)
        return (logits.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)

    library.impl("_flash_attn_forward", forward, "CompositeImplicitAutograd")
    yield torch.ops.flash_attn._flash_attn_forward
    library._destroy()


def flash_logits(q, k, scale, left, softcap, slopes):
    """Heads behind tokens; causal, a window, a soft-cap, ALiBi."""
    logits = q.transpose(1, 2) @ k.transpose(1, 2).mT * scale
    logits = softcap * torch.tanh(logits / softcap)
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    logits = logits - slopes[:, None, None] * distance.abs()
    return logits.masked_fill((distance < 0) | (distance > left), -torch.inf)


def test_flash_attention_is_read_from_its_operator(flash_operator):
    class Flash(Separate):
        def forward(self, x):
            q, k, v = (part.transpose(1, 2) for part in self.make(x))
            slopes = torch.tensor([0.5, 0.25, 0.125, 0.0])
            self.kept = flash_logits(q, k, 0.4, 6, 9.0, slopes).detach()
            return flash_operator(q, k, v, 0.0, 0.4, True, 6, 0, 9.0, slopes, False).flatten(2)

    model = Net(Flash)
    report = watched(model)
    for layer, block in zip(report.training, model.blocks, strict=True):
        assert layer.through == "flash_attn"
        assert_exact(layer, block.attn.kept)


class Silent(Separate):
    """Without what the other tests keep: nothing but the model is compiled."""

    def forward(self, x):
        q, k, v = self.make(x)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("how", ["wrapped", "whole", "inside", "in place"])
def test_compiled_models_run_as_written_while_they_are_watched(how):
    """One graph for all passes: no break inside the model, none for observed passes, and the right numbers."""
    torch.compiler.reset()
    graphs = []
    model, expected = Net(Silent), watched(Net(Silent)).training[1].statistics["entropy"]
    if how == "in place":
        model.compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
        given = run = model
    else:
        options = dict(backend=lambda graph, inputs: graphs.append(graph) or graph.forward, fullgraph=how == "whole")
        run = torch.compile(model, **options)
        given = model if how == "inside" else run
    with AttentionMonitor(given, every=2, scope=Scope(near=4)) as monitor:
        reports = [(run(TOKENS), monitor.step())[1] for _ in range(5)]
    assert len(graphs) == 1 and reports[1] is reports[3] is None
    for report in (reports[2], reports[4]):
        assert report.training[1].statistics["entropy"] == pytest.approx(expected, abs=1e-5)
    assert bool(reports[0].training) == (given is not model), "hooks inside are compiled in the first pass"
