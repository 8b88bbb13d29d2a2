"""Tensors added, dropped, rescaled renamed at random: heads are the model's own attention, or the scan says not."""

import random
import re
from collections import Counter
from functools import cache

import pytest
import torch
from test_families import of_block, own_attention

from locater.errors import Refusal
from locater.models import Config, open_model
from locater.models.neighbours import Surroundings
from saved_models import case_named

FAMILIES = ("llama", "qwen2", "qwen3", "gpt2", "bert", "gpt-neox", "deepseek-v3", "stablelm-2", "t5", "opt")
# Read by other rows: gated queries, gains less one, one tensor for all, cross-attention, images, sound, shared layers.
FURTHER = ("gemma2", "gemma3-text", "cohere", "olmo2", "phi3", "bloom", "gpt-bigcode", "modernbert", "albert-groups")
FURTHER += ("whisper", "clip", "mpnet", "distilbert", "gptj", "codegen", "gpt2-cross", "qwen3-moe", "deepseek-v2")
FURTHER += ("granite", "starcoder2", "xlm-roberta", "mixtral")
KINDS = ("rescale", "drop", "rename", "beside", "inside", "reshape", "everywhere")
# Beside a projection, in an attention module, beneath a norm.
BESIDE = ("weight_scale", "weight_scale_inv", "scale", "weight.absmax", "lora_A.weight", "weight_g", "zeros")
INSIDE = ("sinks", "q_norm.weight", "k_norm.weight", "gate.weight", "attn_scale", "relative_attention_bias.weight")
INSIDE += ("g_proj.weight", "q_proj_2.weight", "temperature", "lambda_q1", "rel_pos_table", "key_scale", "logit_scale")
# Names of what acts on logits in these families; anything else is values, outputs, feed-forward or embeddings.
ACTS = re.compile(
    r"(q_proj|k_proj|query|key|c_attn|q_layernorm|k_layernorm|q_norm|k_norm|query_key_value|q_a_\w+|q_b_proj|kv_a_\w+"
    r"|kv_b_proj|\.q|\.k|relative_attention_bias|input_layernorm|ln_1|self_attn_layer_norm|layer\.0\.layer_norm)\."
)


NUMBER = re.compile(r"\d+")


class Held:
    """Tensors in memory, as a checkpoint offers them."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.names = tensors.keys()

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def read(self, name, rows=None):
        return self.tensors[name] if rows is None else self.tensors[name][rows[0] : rows[1]]


@cache
def built(family):
    case = case_named(family)
    model = case.build()
    return case, model, {name: tensor.clone() for name, tensor in model.state_dict().items()}


@cache
def acting(family: str) -> list[str]:
    """What takes part in the logits: by its name, or because a row reads it."""
    _, model, state = built(family)
    opened = open_model(Config(model.config.to_dict()), Held(state))
    return sorted(name for name in state if ACTS.search(name) or name in Surroundings.of(opened.modules()).read)


def edit(state: dict, acting: list[str], choose: random.Random) -> tuple[dict, str, bool]:
    """One change, what it was, and whether the model can still be that of its config."""
    state = dict(state)
    name, kind = choose.choice(acting), choose.choice(KINDS)
    module = name.rpartition(".")[0]
    if kind == "rescale":
        state[name] = state[name] * choose.uniform(0.2, 3) + choose.uniform(-0.1, 0.1)
        return state, f"rescale {name}", True
    if kind == "drop":
        del state[name]
    elif kind == "everywhere":
        for other in [other for other in state if NUMBER.sub("N", other) == NUMBER.sub("N", name)]:
            del state[other]
    elif kind == "rename":
        state[choose.choice((name + "_old", f"{module}.inner.weight", f"{module}.w"))] = state.pop(name)
    elif kind == "reshape":
        state[name] = torch.cat([state[name]] * 2) if choose.random() < 0.5 else state[name][:-1]
    else:
        places = {"beside": (module, BESIDE), "inside": (module.rpartition(".")[0], INSIDE)}
        where, names = places[kind]
        where = where if "att" in where.rpartition(".")[2].lower() else module  # a layer holds more than attention
        new = f"{where}.{choose.choice(names)}"
        if new in state:
            return edit(state, acting, choose)
        state[new] = torch.rand(4)
    return state, f"{kind} {name}", False


def heads_of(case, model, state):
    """Every layer of the edited file, or None where it was refused or called incomplete."""
    try:
        opened = open_model(Config(model.config.to_dict()), Held(state))
        layers = list(opened.layers())
    except Refusal:
        return None
    said = str(opened.coverage) != case.coverage or any(layer.refused for layer in layers)
    return None if said else layers


def check(family: str, seed: int) -> str:
    case, model, original = built(family)
    choose = random.Random(f"{family} {seed}")
    state, what, is_whole = edit(original, acting(family), choose)
    layers = heads_of(case, model, state)
    if not is_whole:
        assert layers is None, f"{what}: called {case.coverage} all the same"
        return what.split()[0]
    model.load_state_dict(state)
    torch.manual_seed(seed)
    output, seen, _ = own_attention(model, case)
    assert layers is not None, f"{what}: refused for nothing"
    own, calls = {}, Counter()
    for layer in layers:
        theirs = next(own.setdefault(layer.block, of_block(output, layer.block)))
        call = calls[layer.block, layer.query_name]  # a module shared by several layers is called once for each
        calls[layer.block, layer.query_name] += 1
        x_query, x_key = (seen[case.module(name)][call] for name in (layer.query_name, layer.key_name))
        for head in layer.heads:
            torch.testing.assert_close(head.attention(x_query, x_key), theirs[:, head.index], atol=2e-5, rtol=0)
    return "rescale"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_edited_file_is_read_right_or_said_not_to_be(family):
    assert {check(family, seed) for seed in range(40)} == set(KINDS)


@pytest.mark.parametrize("family", FURTHER)
def test_so_is_one_of_another_family(family):
    for seed in range(6):
        check(family, seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", (*FAMILIES, *FURTHER))
def test_thirty_thousand_edited_files(family):
    for seed in range(40, 1040):
        check(family, seed)
