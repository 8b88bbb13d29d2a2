"""More kinds of change to live models: parametrised weights, shared modules, patched calls, adapters of every kind.

`python -m pytest -m slow tests/models/test_live_changes_further.py` changes every number and buffer, one by one.
"""

import functools

import peft
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, add_hook_to_module
from test_cells import FIRST
from test_live_changes import (
    CHANGES,
    NORM,
    Change,
    Q,
    assert_said_or_right,
    attention,
    changed_model,
    eager,
    edit,
    patch,
    say,
)
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from torch.overrides import TorchFunctionMode
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm

from locater import stabilisers
from locater.errors import Refusal, Unforeseen
from locater.models import read_heads
from locater.models.live import open_live
from locater.models.proof.evidence import Evidence
from locater.models.proof.twin import observe_twin
from twins import differences

pytestmark = pytest.mark.filterwarnings("ignore")
KERNEL = functional.scaled_dot_product_attention
BOTH = ["q_proj", "k_proj"]
TURN = "apply_rotary_pos_emb"


class Wave(nn.Module):
    def forward(self, weight):
        return weight + 0.3 * torch.sin(17 * weight)


def wave(module):
    return parametrize.register_parametrization(module, "weight", Wave())


def deal(x, times):
    return x.repeat(1, times, 1, 1)


def switch_off(model, stack):
    stack.enter_context(model.disable_adapter())


def adaption():
    return peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=1, task_type="CAUSAL_LM")


def to_queries(function):
    return lambda model, stack: [function(attention(model).q_proj)]


def tie(model, stack):
    module = attention(model)
    module.k_proj.weight = nn.Parameter(module.q_proj.weight[: module.k_proj.out_features].clone())


def share(name):
    """The second layer's part is the first one's."""
    return lambda model, stack: setattr(model.model.layers[1], name, getattr(model.model.layers[0], name))


class Called(nn.Module):
    """Runs a model with other weights than it has."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, **inputs):
        weights = {name: (1 + ("q_proj" in name)) * one for name, one in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, weights, (), inputs)


def hook_arguments(**changes):
    """Change named arguments of the first attention."""

    def apply(model, stack):
        def before(module, args, kwargs):
            return args, dict(kwargs) | {name: change(kwargs[name]) for name, change in changes.items()}

        attention(model).register_forward_pre_hook(before, with_kwargs=True)

    return apply


def doubled_call(old):
    def call(self, *args, **kwargs):
        output = old(self, *args, **kwargs)
        return 2 * output if isinstance(self, nn.Linear) and self.out_features == 48 else output

    return call


def move_layer(model, stack):
    layer = model.model.layers[0]
    original = layer.forward
    layer.forward = lambda hidden_states, *args, **kwargs: original(hidden_states + 1, *args, **kwargs)


def repeat_layer(model, stack):
    model.model.layers.append(model.model.layers[0])
    model.config.num_hidden_layers = 3


class Doubling(TorchFunctionMode):
    """Its own kernel beneath whoever listens."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = (2 * args[0], *args[1:]) if func is KERNEL else args
        return func(*args, **(kwargs or {}))


def adapted(make, then=lambda model, stack: None):
    """Wrap a model by an adapter whose every trained number was changed."""

    def apply(model, stack):
        model = peft.get_peft_model(model, make())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.2 * torch.randn_like(parameter))
        then(model, stack)
        return model.eval()

    return apply


def lora(**options):
    return lambda: peft.LoraConfig(**({"r": 2, "target_modules": BOTH, "init_lora_weights": False} | options))


def add_second(model, stack):
    model.add_adapter("second", lora(target_modules=["k_proj"])())
    model.base_model.set_adapter(["default", "second"])


class Offload(AlignDevicesHook):
    """Looks like one of accelerate's, and doubles."""

    def post_forward(self, module, output):
        return 2 * output


def two_hooks():
    return SequentialHook(ModelHook(), Offload())


class Doubler:
    def __call__(self, q, k, *rest, **options):
        return 2 * q, k


class OwnWeight(torch.Tensor):
    """A kind of tensor whose products are others."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        output = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * output.as_subclass(torch.Tensor) if func is functional.linear else output


def own_kind(module):
    module.weight = nn.Parameter(module.weight.detach().as_subclass(OwnWeight))


def replace_parts(name, part):
    """In every adapter."""

    def apply(model, stack):
        for module in model.modules():
            if "default" in getattr(module, name, ()):
                getattr(module, name)["default"] = part(getattr(module, name)["default"])

    return apply


def hold(path, name, make):
    """A function that a module holds in place of its class's."""
    return lambda model, stack: setattr(model.get_submodule(path), name, make(model))


def under_a_stabiliser(model, stack):
    module = attention(model)
    original = module.forward
    module.forward = lambda *args, **options: original(
        *args, **options | {"hidden_states": options["hidden_states"] * 3}
    )
    stack.callback(stabilisers.ZLoss(model, weight=1.0).detach)


def of_the_class(model, stack):
    """Numbers that instances no longer hold themselves."""
    stack.enter_context(pytest.MonkeyPatch.context()).setattr(LlamaAttention, "scaling", 1.5, raising=False)
    for layer in model.model.layers:
        del layer.self_attn.scaling


def hook_of(home):
    """A hook from a module of this name."""
    exec("def hook(module, args, output): return 2 * output", names := {"__name__": home})
    return lambda module: module.register_forward_hook(names["hook"])


def own_forward(model):
    return functools.partial(attention(model).q_proj.forward)


def two_linear(model):
    own = attention(model).q_proj
    return functools.partial(functional.linear, weight=2 * own.weight)


FURTHER = [
    Change("another's forward", hold(Q, "forward", lambda model: attention(model, 1).q_proj.forward)),
    Change("torch's function for a norm", hold(NORM, "forward", lambda model: torch.square)),
    Change("torch's method for a norm", hold(NORM, "forward", lambda model: nn.Identity().forward)),
    Change("a function with its weight bound", hold(Q, "forward", two_linear)),
    Change("its forward, bound to nothing", hold(Q, "forward", own_forward), acts=False),
    Change("a forward beneath a stabiliser", under_a_stabiliser),
    Change("torch's forward for a class's", patch(LlamaRMSNorm, "forward", lambda old: nn.Identity.forward)),
    Change("torch's function for a model's", patch(modeling_llama, "rotate_half", lambda old: torch.neg)),
    Change("another family's rotation", patch(modeling_llama, TURN, lambda old: modeling_glm.apply_rotary_pos_emb)),
    Change("a number of the class", of_the_class),
    Change("a hook of a package named alike", to_queries(hook_of("locater_of_mine.hooks"))),
    Change("a hook by accelerate", to_queries(lambda one: add_hook_to_module(one, Offload()))),
    Change("two hooks by accelerate", to_queries(lambda one: add_hook_to_module(one, two_hooks()))),
    Change("rotation by an object", patch(modeling_llama, "apply_rotary_pos_emb", lambda old: Doubler())),
    Change("an own kind of weight", to_queries(own_kind)),
    Change("factors replaced", adapted(lora(), replace_parts("lora_B", lambda one: nn.Sequential(one, nn.Tanh())))),
    Change("dropout replaced", adapted(lora(), replace_parts("lora_dropout", lambda one: nn.ReLU()))),
    Change("weights through a function", to_queries(wave), acts=False),
    Change("orthogonal weights", to_queries(parametrizations.orthogonal), acts=False),
    Change("spectral norm", to_queries(parametrizations.spectral_norm), acts=False),
    Change("weight norm by a hook", to_queries(weight_norm)),
    Change("spectral norm by a hook", to_queries(spectral_norm)),
    Change("rows pruned", to_queries(lambda one: prune.ln_structured(one, "weight", 0.5, 2, 0))),
    Change("keys that begin as queries", tie, acts=False),
    Change("attention of two layers", share("self_attn")),
    Change("norm of two layers", share("input_layernorm"), acts=False),
    Change("called with other weights", lambda model, stack: Called(model)),
    Change("a hook on the rotation", hook_arguments(position_embeddings=lambda pair: (pair[0], 2 * pair[1]))),
    Change("call of all modules", patch(nn.Module, "__call__", doubled_call)),
    Change("eight bits at run time", lambda model, stack: torch.ao.quantization.quantize_dynamic(model, {nn.Linear})),
    Change("forward of a layer", move_layer, acts=False),
    Change("a layer that is not run", edit("config.num_hidden_layers", 1)),
    Change("a layer twice", repeat_layer),
    Change("key heads dealt in turn", eager(patch(modeling_llama, "repeat_kv", lambda old: deal))),
    Change("a mode", lambda model, stack: stack.enter_context(Doubling())),
    Change("two adapters", adapted(lora(target_modules=["q_proj"]), add_second), acts=False),
    Change("adapter merged", adapted(lora(), lambda model, stack: model.merge_adapter()), acts=False),
    Change("adapter disabled", adapted(lora(), switch_off), acts=False),
    Change("PiSSA", adapted(lora(init_lora_weights="pissa")), acts=False),
    Change("LoRA with biases", adapted(lora(lora_bias=True))),
    Change("LoRA behind a token", adapted(lora(alora_invocation_tokens=[5], task_type="CAUSAL_LM"))),
    Change("projections saved whole", adapted(lora(target_modules=["v_proj"], modules_to_save=["q_proj"]))),
    Change("norms saved whole", adapted(lora(target_modules=["v_proj"], modules_to_save=["input_layernorm"]))),
    Change("LoHa", adapted(lambda: peft.LoHaConfig(r=2, target_modules=BOTH))),
    Change("OFT", adapted(lambda: peft.OFTConfig(oft_block_size=4, r=0, target_modules=BOTH))),
    Change("IA3", adapted(lambda: peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]))),
    Change("VeRA", adapted(lambda: peft.VeraConfig(r=2, target_modules=["q_proj"]))),
    Change("tuned norms", adapted(lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]))),
    Change("adaption prompts", adapted(adaption)),
    Change("falcon's factor before attention", edit("model.layers.0.attention_in_multiplier", 3.0), "falcon-h1"),
    Change("a t5 block without cross-attention", edit("decoder.block.0.is_decoder", False), "t5"),
]  # fmt: skip


def test_there_are_a_hundred_kinds():
    assert len({change.name for change in [*CHANGES, *FURTHER]}) == len(CHANGES) + len(FURTHER) >= 100


@pytest.mark.parametrize("with_sample", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("change", FURTHER, ids=lambda change: change.name)
def test_a_changed_model_is_never_called_complete_and_read_wrong(change, with_sample):
    assert_said_or_right(change, with_sample)


# --------------------------------------------------------------------------------------- whatever a module holds
def other_values(value) -> list:
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, 2 * value or 3] if value < 10**6 else []
        case float():
            return [1.7 * value + 0.3]
        case None:
            return [3, 0.7]
    return []


def other_buffer(buffer):
    if buffer.dtype == torch.bool:
        return ~buffer
    return 1.3 * buffer + 0.01 if buffer.is_floating_point() else buffer + 1


def held(model) -> list[tuple]:
    """(table, name, another value) of everything simple in the first module of each class."""
    found = {}
    for module in model.modules():
        simple = {key: value for key, value in vars(module).items() if key[0] != "_" and key != "training"}
        for key, value in simple.items():
            for number, other in enumerate(other_values(value)):
                found.setdefault((type(module), key, number), (vars(module), key, other))
        for key, buffer in module._buffers.items():
            if buffer is not None:
                found.setdefault((type(module), key), (module._buffers, key, other_buffer(buffer)))
    return list(found.values())


def fault(model, inputs, sample) -> str | None:
    """In words, what is wrong with heads of a model that is not called PARTIAL; None where all is right or said."""
    try:
        opened = open_live(model, sample=sample)
        coverage, layers = str(opened.coverage()), list(map(read_heads, opened.sites))
    except Refusal as reason:
        return str(reason) if isinstance(reason, Unforeseen) else None
    not_run = sample is not None and not coverage.startswith("COMPLETE")
    if "PARTIAL" in coverage or not_run or any(layer.refused for layer in layers):
        return None
    evidence = Evidence(model, observe_twin(model, inputs))
    words = next(differences(evidence, layers, is_complete=coverage.startswith("COMPLETE")), None)
    return None if words is None else f"{words} ({coverage})"


def softmaxes(model, inputs) -> list:
    torch.manual_seed(0)
    return [call.logits for call in observe_twin(model, inputs).calls]


def acts(model, inputs, usual) -> bool:
    try:
        found = softmaxes(model, inputs)
    except Exception:  # no such model runs
        return False
    return len(found) != len(usual) or not all(map(torch.equal, found, usual))


HARMLESS = {"chunk_size_feed_forward"}  # rounds otherwise


@pytest.mark.slow
@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.name)
def test_whatever_a_module_holds_is_right_or_said_when_changed(case):
    model = case.build()
    torch.manual_seed(0)
    inputs, faults = case.inputs(model.config), []
    with torch.no_grad():
        usual = softmaxes(model, inputs)
        for table, key, other in held(model):
            before, table[key] = table[key], other
            if key not in HARMLESS and acts(model, inputs, usual):
                found = [fault(model, inputs, sample) for sample in (None, inputs)]
                faults += [f"{key} = {other!s:.40}: {words}" for words in found if words]
            table[key] = before
    assert not faults


def test_a_model_that_was_compiled_leaves_no_trace_in_others():
    """torch.compile puts functions of its own into the module whose code it has compiled."""
    with changed_model(Change("none", lambda model, stack: None)) as (model, inputs):
        modeling_llama.__dict__["__compiled_fn_0_test"] = lambda *args: None
        try:
            assert say(model, inputs, None)[0] == "by the table, not run"
        finally:
            del modeling_llama.__dict__["__compiled_fn_0_test"]
