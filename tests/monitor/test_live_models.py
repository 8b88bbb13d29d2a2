"""Forty live models: what the monitor says equals a materialised softmax of what the kernel gets, to 1e-5.

Hand-written, of families that tables name, of types that a proof reads, with adapters, and with every stabiliser. The
reference listens behind the monitor and behind every stabiliser, and is written out here, away from the package.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from test_calls import assert_exact
from test_monitor_families import pair
from test_proof import CASES as PROVEN
from test_proof import SIZES
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

import hand_written
import written_models
from family_cases import CASES
from locater import stabilisers
from locater.attention.calls import attend
from locater.models.proof import prove
from locater.monitor import AttentionMonitor, Scope
from locater_lab import rivals
from locater_lab.train.model import LanguageModel
from locater_lab.train.shape import Shape

TOKENS = torch.randint(0, 40, (3, 24), generator=torch.Generator().manual_seed(1))
BY_NAME = {case.name: case for case in CASES}
WITH_SINKS = "mimo_v2_flash"  # which keep it from every kernel: it has a test of its own


class Reference(TorchFunctionMode):
    """The logits of every attention, −inf where a key is masked, as the kernel's documentation defines them."""

    def __init__(self):
        super().__init__()
        self.logits = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is scaled_dot_product_attention:
            self.logits.append(written_out(*args, **(kwargs or {})).detach())
        if func is attend:
            (call,) = args
            raw = written_out(call.query, call.key, call.value, scale=call.scale, enable_gqa=call.enable_gqa)
            capped = call.softcap * torch.tanh(raw / call.softcap)
            self.logits.append(masked(capped, call.attn_mask, call.is_causal).detach())
        return func(*args, **(kwargs or {}))


def written_out(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    key = key.double().repeat_interleave(query.shape[1] // key.shape[1], 1) if enable_gqa else key.double()
    logits = query.double() @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return masked(logits, attn_mask, is_causal)


def masked(logits, attn_mask, is_causal):
    if is_causal:
        logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        return logits.masked_fill(~attn_mask, -torch.inf)
    if attn_mask is not None:
        return (logits + attn_mask).masked_fill((attn_mask < -1e4).expand_as(logits), -torch.inf)
    return logits


@dataclass(frozen=True)
class Live:
    """A model, how it is called, and what is attached to it."""

    name: str
    make: Callable[[], nn.Module]
    call: Callable[[nn.Module], object] = lambda model: model(TOKENS)


def small():
    """Ours, as `locater train` makes it: the model that carries every stabiliser."""
    torch.manual_seed(0)
    model = LanguageModel(Shape(vocab_size=40, context=24, d_model=32, d_feedforward=32, num_heads=4, num_layers=2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def of_case(case):
    """Under the fused kernel."""
    return lambda: pair(case)[1]


def call_case(case):
    def call(model):
        torch.manual_seed(1)
        return model(**case.inputs(model.config))

    return call


def adapted(make, targets, **options):
    def tuned():
        model = make()
        return get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **options))

    return tuned


def stabilised(attach):
    def make():
        model = small()
        model.attached = [attach(model)]
        return model

    return make


WRITTEN = [kind for kind in written_models.KINDS if kind is not written_models.Packed]
OWN = [hand_written.Bare, hand_written.Tied, hand_written.Backwards, hand_written.Scaled, hand_written.NormedByHand]
TABLE = [
    "gpt2",
    "llama",
    "mistral",
    "qwen3",
    "olmo2",
    "phi3",
    "falcon-40b",
    "gpt-neox",
    "opt",
    "bert",
    "cohere2",
]
MORE = dict(
    arcee=("Arcee", {}), helium=("Helium", dict(head_dim=8)),
    apertus=("Apertus", {}), hunyuan=("HunYuanDenseV1", dict(head_dim=8)), glm=("Glm", dict(head_dim=8)),
    ministral=("Ministral", dict(head_dim=8, sliding_window=6)), nemotron=("Nemotron", {}),
)  # fmt: skip
ATTACHED = {
    "LocAteR": lambda model: stabilisers.LocAteR(model, strength=1e-3),
    "QKNorm": stabilisers.QKNorm,
    "QKClip": lambda model: stabilisers.QKClip(model, threshold=1.0),
    "SoftCap": lambda model: stabilisers.SoftCap(model, cap=3.0),
    "SigmaReparam": stabilisers.SigmaReparam,
    "SpectralNorm": rivals.SpectralNorm,
    "ZLoss": lambda model: stabilisers.ZLoss(model, weight=1e-3),
    "EntropyBonus": lambda model: stabilisers.EntropyBonus(model, weight=1e-3),
    "QKDecay": lambda model: stabilisers.QKDecay(model, decay=0.1),
    "SpectralInitialisation": lambda model: rivals.SpectralInitialisation(model, xi=0.5, eta=2.0),
}
QUICK = {"Fused", "Grouped", "Alibi", "Bare", "llama", "glm4", "LocAteR", "SoftCap", "DoRA on Fused"}


def models():
    for kind in WRITTEN:
        yield Live(kind.__name__, lambda kind=kind: written_models.Net(kind))
    for kind in OWN:
        yield Live(f"{kind.__name__}", lambda kind=kind: hand_written.decoder(kind))
    for name in TABLE:
        yield Live(name, of_case(BY_NAME[name]), call_case(BY_NAME[name]))
    further = [type(PROVEN[0])(name, f"{n}Config", f"{n}ForCausalLM", SIZES | more) for name, (n, more) in MORE.items()]
    for case in [*(case for case in PROVEN if case.name != WITH_SINKS), *further]:
        yield Live(case.name, of_case(case), call_case(case))
    fused, separate = (
        lambda kind=kind: written_models.Net(kind) for kind in (written_models.Fused, written_models.Separate)
    )
    yield Live("LoRA on Separate", adapted(separate, ["q_proj", "k_proj"]))
    yield Live("DoRA on Fused", adapted(fused, ["qkv"], use_dora=True))
    for name in ("llama", "gpt2"):
        targets, layout = (["q_proj"], {}) if name == "llama" else (["c_attn"], dict(fan_in_fan_out=True))
        yield Live(f"LoRA on {name}", adapted(of_case(BY_NAME[name]), targets, **layout), call_case(BY_NAME[name]))
    case = PROVEN[0]
    yield Live("DoRA on glm4", adapted(of_case(case), ["q_proj", "k_proj"], use_dora=True), call_case(case))
    for name, attach in ATTACHED.items():
        yield Live(name, stabilised(attach))


LIVE = list(models())


def test_there_are_forty_and_more():
    assert len({one.name for one in LIVE}) == len(LIVE) >= 40 and {one.name for one in LIVE} >= QUICK


def test_every_stabiliser_is_among_them():
    kinds = (getattr(home, name) for home in (stabilisers, rivals) for name in home.__all__)
    classes = {one.__name__ for one in kinds if isinstance(one, type) and issubclass(one, stabilisers.Stabiliser)}
    assert classes - {"Stabiliser"} == set(ATTACHED)


@pytest.mark.slow
def test_ten_of_the_types_are_proven_by_a_twin_here_and_now(tmp_path, monkeypatch):
    """With an empty cache; tables name Nemotron by now."""
    monkeypatch.setenv("LOCATER_CACHE", str(tmp_path))
    names = [case.config for case in PROVEN] + [f"{name}Config" for name, _ in MORE.values()]
    proofs = {name: prove(getattr(transformers, name).model_type) for name in names}
    proven = [name for name, proof in proofs.items() if proof.is_proven and proof.error <= 1e-5]
    assert len(proven) >= 10, {name: proof.reason for name, proof in proofs.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "live", [pytest.param(one, marks=[] if one.name in QUICK else pytest.mark.slow, id=one.name) for one in LIVE]
)
def test_statistics_equal_a_softmax_inside_the_model(live):
    model, reference = live.make(), Reference()
    with AttentionMonitor(model, every=1, scope=Scope(near=4)) as monitor, reference, torch.no_grad():
        live.call(model)
        report = monitor.report()
    layers = report.training or report.no_grad or report.evaluation
    assert len(layers) == len(reference.logits) > 0
    for layer, logits in zip(layers, reference.logits, strict=True):
        assert_exact(layer, logits)
        assert {"entropy", "max_logit", "sink_mass"} <= layer.statistics.keys()


def test_learned_sinks_count_as_in_the_models_own_probabilities():
    case = next(case for case in PROVEN if case.name == WITH_SINKS)
    torch.manual_seed(0)
    model = case.build().eval()
    sinks = [parameter for name, parameter in model.named_parameters() if name.endswith("sinks")]
    assert len(sinks) == 2, "one of three layers has none"
    for parameter in sinks:
        nn.init.normal_(parameter)
    with AttentionMonitor(model, every=1, scope=Scope(near=4)) as monitor, torch.no_grad():
        output = model(**case.inputs(model.config), output_attentions=True)
        report = monitor.report()
    for layer, attention in zip(report.evaluation, output.attentions, strict=True):
        p = attention.double()
        queries, keys = torch.meshgrid(*map(torch.arange, p.shape[-2:]), indexing="ij")
        near = p * ((queries - keys < 4) & (queries >= keys))
        whole = torch.cat([p, (1 - p.sum(-1, keepdim=True)).clamp(min=0)], -1)  # what is left is the sink's
        expected = {"near_mass": near.sum(-1), "sink_mass": p[..., 0], "entropy": -torch.xlogy(whole, whole).sum(-1)}
        for name, values in expected.items():
            found = torch.tensor(layer.statistics[name], dtype=torch.float64)
            torch.testing.assert_close(found, values.mean((0, 2)), atol=1e-5, rtol=0)
