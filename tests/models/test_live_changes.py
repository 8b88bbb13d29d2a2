"""Live models changed in sixty ways, with a sample and without: read right, called PARTIAL, or refused.

The reference listens to the softmax of the model itself and knows nothing of the package.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import peft
import pytest
import torch
import transformers
from test_live_models import masked, written_out
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.overrides import TorchFunctionMode
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm

import locater
from locater import stabilisers
from locater.errors import Refusal
from locater.monitor import AttentionMonitor
from saved_models import case_named

SAMPLE = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(5))
KERNEL = functional.scaled_dot_product_attention  # before any change


def attention(model, layer=0):
    return model.model.layers[layer].self_attn


def edit(path: str, value) -> Callable:
    """Set an attribute of the model; a function of the old one, or the value itself."""

    def apply(model, stack):
        *outer, last = path.split(".")
        owner = functools.reduce(getattr, outer, model)
        setattr(owner, last, value(getattr(owner, last)) if callable(value) else value)

    return apply


def hook(path: str, function: Callable) -> Callable:
    """What a module gives, changed."""
    return lambda model, stack: model.get_submodule(path).register_forward_hook(lambda m, args, out: function(out))


def pre_hook(path: str, function: Callable) -> Callable:
    """What a module is given, changed."""

    def before(module, args, kwargs):
        if args:
            return (function(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": function(kwargs["hidden_states"])}

    return lambda model, stack: model.get_submodule(path).register_forward_pre_hook(before, with_kwargs=True)


def patch(owner, name: str, make: Callable) -> Callable:
    """A function of a class or module replaced for the test."""

    def apply(model, stack):
        monkey = stack.enter_context(pytest.MonkeyPatch.context())
        monkey.setattr(owner, name, make(getattr(owner, name)))

    return apply


def replace(path: str, make: Callable) -> Callable:
    """A module replaced."""

    def apply(model, stack):
        outer, _, last = path.rpartition(".")
        setattr(model.get_submodule(outer), last, make(model.get_submodule(path)))

    return apply


def doubling(original):
    """Logits twice as large, by the scale that a kernel is told."""

    def attend(module, *args, **kwargs):
        kwargs["scaling"] = 2 * (kwargs.get("scaling") or 1.0)
        return original(module, *args, **kwargs)

    return attend


class Doubled(LlamaAttention):
    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states * 2, *args, **kwargs)


class Same(LlamaAttention):
    """Another class that does the same."""


class DoubledLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def another_class(kind):
    def apply(model, stack):
        for layer in model.model.layers:
            layer.self_attn.__class__ = kind

    return apply


def own_instance_forward(model, stack):
    module = attention(model)
    original = module.forward

    def forward(hidden_states, *args, **kwargs):
        return original(hidden_states * 1.5, *args, **kwargs)

    module.forward = forward


def interface(model, stack):
    name = "doubled_for_a_test"
    original = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    transformers.AttentionInterface.register(name, doubling(original))
    masks = transformers.masking_utils
    masks.AttentionMaskInterface.register(name, masks.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.config._attn_implementation = name


def overridden_interface(model, stack):
    known = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    original = known["sdpa"]
    known["sdpa"] = doubling(original)
    stack.callback(lambda: known.__setitem__("sdpa", original))


def eager(then: Callable) -> Callable:
    def apply(model, stack):
        model.set_attn_implementation("eager")
        then(model, stack)

    return apply


def global_hook(model, stack):
    def twice(module, args, output):
        return 2 * output if isinstance(module, nn.Linear) and module.out_features == 48 else None

    stack.callback(nn.modules.module.register_module_forward_hook(twice).remove)


def added_norm(model, stack):
    """Queries normed by a module that no row knows."""
    module = attention(model)
    module.q_norm, original = nn.LayerNorm(module.head_dim), module.q_proj.forward

    def forward(x):
        return module.q_norm(original(x).unflatten(-1, (-1, module.head_dim))).flatten(-2)

    module.q_proj.forward = forward


def without_norm(model, stack):
    layer = model.model.layers[1]
    layer.input_layernorm.forward = lambda x: x


def register_bias(model, stack):
    module = attention(model).q_proj
    module.bias = nn.Parameter(torch.ones(module.out_features))


def lora(**options):
    def apply(model, stack):
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **options)
        return peft.get_peft_model(model, config)

    return apply


def in_place(model, stack):
    attention(model).q_proj.weight.data.mul_(3)


def prompts(model, stack):
    return peft.get_peft_model(model, peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))


@dataclass(frozen=True)
class Change:
    """`apply(model, stack)` changes a model in place, or gives another; `acts`: whether its logits change by it."""

    name: str
    apply: Callable
    case: str = "llama"
    acts: bool = True


def attach(make):
    def apply(model, stack):
        stack.callback(make(model).detach)

    return apply


Q, K, A = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn"
NORM, ROTARY = "model.layers.0.input_layernorm", "model.rotary_emb"
twice = functools.partial(torch.mul, 2)
CHANGES = [
    Change("scaling of a layer", edit(f"{A}.scaling", lambda old: 2 * old)),
    Change("scaling a little", edit(f"{A}.scaling", lambda old: 1.01 * old)),
    Change("not causal", edit(f"{A}.is_causal", False)),
    Change("another class", another_class(Doubled)),
    Change("another class, the same", another_class(Same), acts=False),
    Change("forward of an instance", own_instance_forward),
    Change("forward of a projection", lambda model, stack: setattr(attention(model).q_proj, "forward", lambda x: x)),
    Change(
        "forward of a class",
        patch(
            LlamaAttention,
            "forward",
            lambda old: functools.wraps(old)(
                lambda self, hidden_states, *args, **kwargs: old(self, -hidden_states * 2, *args, **kwargs)
            ),
        ),
    ),
    Change("forward of a norm's class", patch(LlamaRMSNorm, "forward", lambda old: lambda self, x: old(self, x) + 1)),
    Change("frequencies", edit(f"{ROTARY}.inv_freq", lambda old: old / 2)),
    Change("one frequency", edit(f"{ROTARY}.inv_freq", lambda old: old * torch.tensor([1.0] * (len(old) - 1) + [9.0]))),
    Change("rotary's amplitude", edit(f"{ROTARY}.attention_scaling", 1.3)),
    Change("config's base", edit("config.rope_parameters", lambda old: old | {"rope_theta": 50.0})),
    Change("config's epsilon", edit("config.rms_norm_eps", 3.0)),
    Change("config's heads", edit("config.num_attention_heads", 8)),
    Change("config's key heads", edit("config.num_key_value_heads", 4)),
    Change("config's size of a head", edit("config.head_dim", 6)),
    Change("config's type", edit("config.model_type", "mistral")),
    Change("hook behind q_proj", hook(Q, twice)),
    Change("hook behind k_proj", hook(K, lambda out: out + torch.linspace(-1, 1, out.shape[-1]))),
    Change("hook behind q_proj that looks", hook(Q, lambda out: None), acts=False),
    Change("hook before q_proj", pre_hook(Q, twice)),
    Change("hook before both by attention", pre_hook(A, lambda x: x.flip(-1))),
    Change("hook behind the norm", hook(NORM, lambda out: out + 1)),
    Change("hook behind the rotary table", hook(ROTARY, lambda out: (out[1], out[0]))),
    Change("hook behind v_proj", hook("model.layers.0.self_attn.v_proj", twice), acts=False),
    Change("hook behind mlp", hook("model.layers.0.mlp", twice), acts=False),
    Change("hook on all modules", global_hook),
    Change("an interface of one's own", interface),
    Change("the interface overridden", overridden_interface),
    Change(
        "rotation patched",
        patch(modeling_llama, "apply_rotary_pos_emb", lambda old: lambda q, k, cos, sin, **rest: (q, k)),
    ),
    Change("half turn patched", patch(modeling_llama, "rotate_half", lambda old: lambda x: -old(x))),
    Change("eager attention patched", eager(patch(modeling_llama, "eager_attention_forward", doubling))),
    Change(
        "torch's kernel patched",
        patch(
            functional,
            "scaled_dot_product_attention",
            lambda old: lambda q, *rest, **options: old(2 * q, *rest, **options),
        ),
    ),
    Change(
        "torch's linear patched",
        patch(functional, "linear", lambda old: lambda x, w, b=None: old(x, w, b) * (2 if len(w) == 48 else 1)),
    ),
    Change("SoftCap", attach(lambda model: stabilisers.SoftCap(model, cap=0.3))),
    Change("QKNorm", attach(stabilisers.QKNorm)),
    Change("QKClip", attach(stabilisers.QKClip), acts=False),
    Change("another linear", replace(Q, lambda old: copied(old, DoubledLinear))),
    Change("a sequence for a linear", replace(Q, lambda old: nn.Sequential(old, nn.GELU()))),
    Change("a layer norm", replace(NORM, lambda old: nn.LayerNorm(48))),
    Change("a layer norm without numbers", replace(NORM, lambda old: nn.LayerNorm(48, bias=False))),
    Change("no norm", replace(NORM, lambda old: nn.Identity())),
    Change("a norm that does nothing", without_norm),
    Change("epsilon of a norm", edit(f"{NORM}.variance_epsilon", 5.0)),
    Change("a bias", register_bias, "mistral"),
    Change("another bias", register_bias, acts=False),
    Change("a norm of queries", added_norm),
    Change("a layer less", edit("model.layers", lambda old: old[:1])),
    Change("layers reversed", edit("model.layers", lambda old: nn.ModuleList(reversed(old))), acts=False),
    Change("weights times three", in_place, acts=False),
    Change("weight norm", lambda model, stack: [parametrizations.weight_norm(attention(model).q_proj)], acts=False),
    Change("pruned", lambda model, stack: [prune.random_unstructured(attention(model).q_proj, "weight", 0.5)]),
    Change("LoRA", lora(), acts=False),
    Change("DoRA", lora(use_dora=True), acts=False),
    Change("learned prompts", prompts),
    Change("double", lambda model, stack: model.double(), acts=False),
    Change("bfloat16", lambda model, stack: model.bfloat16(), acts=False),
    Change("gemma2's cap", edit("model.layers.0.self_attn.attn_logit_softcapping", 1.0), "gemma2"),
    Change("gemma2's scaling", edit("model.layers.1.self_attn.scaling", 1.0), "gemma2"),
    Change("mistral's window", edit("config.sliding_window", 2), "mistral", acts=False),
    Change("gpt2's scaling by layer", edit("transformer.h.1.attn.scale_attn_weights", False), "gpt2"),
    Change("gpt2's projection", hook("transformer.h.0.attn.c_attn", twice), "gpt2"),
    Change("bert's scaling", edit("bert.encoder.layer.0.attention.self.scaling", 1.0), "bert"),
    Change("bert's embedding norm", hook("bert.embeddings.LayerNorm", lambda out: out + 3), "bert"),
    Change("t5's buckets", edit("encoder.block.0.layer.0.SelfAttention.relative_attention_max_distance", 4), "t5"),
    Change("qwen3's norm of queries", hook("model.layers.0.self_attn.q_norm", twice), "qwen3"),
]


def copied(old, kind):
    new = kind(old.in_features, old.out_features, bias=old.bias is not None)
    new.weight = old.weight
    return new


class Softmax(TorchFunctionMode):
    """The final logits of every attention of a pass, in order, −inf where masked."""

    def __init__(self):
        super().__init__()
        self.logits = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is KERNEL:
            self.logits.append(written_out(*args, **kwargs).detach())
        elif func in (functional.softmax, torch.softmax) and args[0].dim() == 4:
            self.logits.append(args[0].detach().double().masked_fill(args[0] < -1e4, -torch.inf))
        elif func is locater.attention.calls.attend:
            (call,) = args
            raw = written_out(call.query, call.key, call.value, scale=call.scale, enable_gqa=call.enable_gqa)
            self.logits.append(masked(call.softcap * torch.tanh(raw / call.softcap), call.attn_mask, call.is_causal))
        return func(*args, **kwargs)


def inner(model):
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_right(model, inputs, layers) -> bool:
    """Whether the heads' attention is that of the model's softmaxes, and their norms make what they are given."""
    given, hooks = {}, []
    base = inner(model)
    for name, module in base.named_modules():

        def keep(module, args, kwargs, name=name):
            given.setdefault(name, []).append(args[0] if args else kwargs.get("hidden_states"))

        hooks.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    with torch.no_grad(), Softmax() as seen:
        model(**inputs)
    for one in hooks:
        one.remove()
    if len(seen.logits) != len(layers):
        return False
    allowed = 0.05 if next(model.parameters()).dtype == torch.bfloat16 else 1e-4
    norms = [name for name, module in base.named_modules() if "norm" in name.lower() or "ln_" in name]
    for layer, theirs in zip(layers, seen.logits, strict=True):
        x, x_key = (given[name][0].double() for name in (layer.query_name, layer.key_name))
        if len(layer.heads) != theirs.shape[1]:
            return False
        for head in layer.heads:
            own = head.attention(x, x_key)
            if (
                own.shape != theirs[:, head.index].shape
                or float((own - theirs[:, head.index].softmax(-1)).abs().max()) > allowed
            ):
                return False
        norm = layer.heads[0].query.input_norm
        if norm is not None:
            before = [y for name in norms for y in given.get(name, ()) if y is not None and y.shape == x.shape]
            if not any(float((norm(y.double()) - x).abs().max()) < allowed * float(x.abs().max()) for y in before):
                return False
    return True


def say(model, inputs, sample) -> tuple[str, list]:
    """The coverage line and the layers; a refusal is a line of its own."""
    try:
        line = locater.scan(locater.Live(model, sample=sample), length=16).coverage
        return line, list(locater.models.live.open_live(model, sample=sample).layers())
    except Refusal as reason:
        return f"refused: {reason}", []


@pytest.mark.parametrize("with_sample", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_a_changed_model_is_never_called_complete_and_read_wrong(change, with_sample):
    assert_said_or_right(change, with_sample)


@contextmanager
def changed_model(change: Change) -> Iterator[tuple[nn.Module, dict[str, torch.Tensor]]]:
    """A model as changed, and inputs of its own."""
    case = case_named(change.case)
    model = copy.deepcopy(case.build())
    torch.manual_seed(0)
    inputs = case.inputs(model.config)
    with ExitStack() as stack:
        if change.case == "llama":
            model.set_attn_implementation("sdpa")
        changed = change.apply(model, stack)
        yield changed if isinstance(changed, nn.Module) else model, inputs


def assert_said_or_right(change: Change, with_sample: bool) -> None:
    with changed_model(change) as (model, inputs):
        line, layers = say(model, inputs, inputs if with_sample else None)
        says_so = line.startswith(("PARTIAL", "refused"))
        assert says_so or is_right(model, inputs, layers), line
        assert with_sample or not line.startswith("COMPLETE")
        if not change.acts and with_sample:
            assert line.startswith("COMPLETE"), line
        assert not (change.acts and not with_sample) or says_so, line


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_no_bound_stands_beside_a_changed_models_logits(change):
    """Where the monitor bounds logits, the heads it was made of are the model's."""
    with changed_model(change) as (model, inputs):
        model.train()
        try:
            with AttentionMonitor(model, every=1) as monitor:
                model(**inputs)
                report = monitor.step()
        except Refusal:
            return
        bounded = [layer for layer in report.training if not all(map(math.isnan, bounds_of(layer)))]
        for layer in bounded:
            pairs = zip(layer.statistics["max_logit"], bounds_of(layer), strict=True)
            assert all(math.isnan(bound) or logit <= 1.01 * bound for logit, bound in pairs)
        if len(bounded) == len(report.training) > 0 and change.name not in BOUNDED:
            layers = list(locater.models.live.open_live(model).layers())
            assert is_right(model.eval(), inputs, layers), report.notes


# Its cap is the bound; norms of any kind and epsilon have it; of a hidden kernel only what modules were given is told.
BOUNDED = ("SoftCap", "config's epsilon", "epsilon of a norm", "a layer norm", "a layer norm without numbers")
BOUNDED += (
    "torch's kernel patched",
    "not causal",
    "bert's embedding norm",
)  # behind dropout no length is held to a norm


def bounds_of(layer):
    return layer.weights.get("logit_bound", (math.nan,))


def test_an_unchanged_models_bounds_stand():
    model = case_named("llama").build().train()
    with AttentionMonitor(model, every=1) as monitor:
        model(SAMPLE)
        report = monitor.step()
    assert all(not math.isnan(bound) for layer in report.training for bound in bounds_of(layer))
    assert not any("withdrawn" in note for note in report.notes)


def test_a_bound_that_a_measurement_contradicts_is_withdrawn():
    model = case_named("llama").build().train()
    with AttentionMonitor(model, every=1) as monitor:
        model(SAMPLE)
        with torch.no_grad():
            attention(model).q_proj.weight.mul_(1e-3)  # an optimiser's step: the weights bound less than was seen
        report = monitor.step()
    first, second = (bounds_of(layer) for layer in report.training)
    assert any(map(math.isnan, first)) and not any(map(math.isnan, second))
    logits = report.training[0].statistics["max_logit"]
    assert all(math.isnan(bound) or logit <= bound for logit, bound in zip(logits, first, strict=True))
    assert sum("withdrawn" in note for note in report.notes) == 1
