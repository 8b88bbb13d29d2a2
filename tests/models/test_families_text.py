"""What the families of text say beyond one forward pass: older spellings, refusals, and what they leave out."""

from dataclasses import dataclass

import pytest
import torch

from family_cases.base import Case
from family_cases.gpt import add_alibi_once
from locater.errors import Refusal
from locater.models import Config, find_family, open_model
from locater.models.tables.gpt import alibi_slope

SIZES = dict(vocab_size=99, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
REFINED = dict(hidden_size=48, n_layer=3, n_head=4)


@dataclass(frozen=True)
class Memory:
    """Named tensors in memory."""

    tensors: dict

    @property
    def names(self):
        return self.tensors.keys()

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def read(self, name, rows=None):
        return self.tensors[name] if rows is None else self.tensors[name][slice(*rows)]


def heads_of(config, tensors):
    layers = list(open_model(Config(config), Memory(tensors)).layers())
    assert not any(layer.refused for layer in layers)
    return [head for layer in layers for head in layer.heads]


def first_bert_names(name):
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


FALCON = ("FalconConfig", "FalconForCausalLM")
OLDER = {
    "RefinedWeb": (
        Case("", *FALCON, SIZES | dict(new_decoder_architecture=True, num_kv_heads=2)),
        REFINED | dict(model_type="RefinedWeb", n_head_kv=2, alibi=False, multi_query=True),
    ),
    "RefinedWebModel": (
        Case("", *FALCON, SIZES),
        REFINED | dict(model_type="RefinedWebModel", multi_query=True, alibi=False),
    ),
    "RefinedWebModel-alibi": (
        Case("", *FALCON, SIZES | dict(multi_query=False, alibi=True, bias=True)),
        REFINED | dict(model_type="RefinedWebModel", multi_query=False, alibi=True),
    ),
    "gpt-neo": (
        Case(
            "",
            "GPTNeoConfig",
            "GPTNeoModel",
            dict(vocab_size=99, hidden_size=48, num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]]),
        ),
        dict(
            model_type="gpt_neo",
            hidden_size=48,
            num_layers=4,
            num_heads=4,
            window_size=256,
            attention_types=[[["global", "local"], 2]],
        ),
    ),
    "bert": (
        Case("", "BertConfig", "BertForMaskedLM", SIZES),
        {key: SIZES[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
        | dict(model_type="bert"),
    ),
}


@pytest.mark.parametrize("name", OLDER)
def test_older_spellings_give_the_same_heads(name):
    case, older = OLDER[name]
    model = case.build()
    state = model.state_dict()
    ours = heads_of(model.config.to_dict(), state)
    theirs = heads_of(older, {first_bert_names(name): tensor for name, tensor in state.items()})
    assert len(ours) == len(theirs) >= 12
    x = torch.randn(5, 48)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.lookback, one.lookahead, one.block) == (other.lookback, other.lookahead, other.block)
        torch.testing.assert_close(one.logits(x, x), other.logits(x, x), atol=0, rtol=0)
        torch.testing.assert_close(one.folded().logits(x, x), other.folded().logits(x, x), atol=0, rtol=0)


def test_falcon_adds_alibi_once():
    case = Case("", *FALCON, SIZES | dict(multi_query=False, alibi=True), prepare=add_alibi_once)
    once = case.build()
    inputs = case.inputs(once.config)
    sdpa = type(once)._from_config(once.config, attn_implementation="sdpa").eval()
    sdpa.load_state_dict(once.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(sdpa(**inputs).logits, once(**inputs, output_attentions=True).logits)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 7, 8, 12, 40, 71, 112])
def test_alibi_slopes_are_those_of_bloom(num_heads):
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

    ours = torch.tensor([alibi_slope(index, num_heads) for index in range(num_heads)])
    torch.testing.assert_close(ours, _get_alibi_slopes(num_heads, torch.device("cpu")))


def test_a_file_without_model_type_is_known_by_its_names_or_refused():
    config = Config(dict(n_layer=1, n_head=4, n_embd=48, block_size=8, bias=False))
    parts = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    names = ["transformer.wpe.weight", *(f"transformer.h.0.{part}.weight" for part in parts)]
    assert find_family(config, names).name == "nanogpt"
    with pytest.raises(Refusal, match="a known family"):
        find_family(config, ["transformer.h.0.attn.qkv.weight"])


def test_transposed_weights_are_not_taken_for_nanogpt():
    settings = dict(n_layer=1, n_head=4, n_embd=48, block_size=8)
    state = Case("", "GPT2Config", "GPT2LMHeadModel", settings | dict(vocab_size=99)).build().state_dict()
    with pytest.raises(Refusal, match="disagree"):
        list(open_model(Config(settings), Memory(state)).layers())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(model_type="bert", position_embedding_type="absolute"), None),
        (
            dict(model_type="bert", position_embedding_type="relative_key"),
            "the position terms of relative_key left out",
        ),
        (dict(model_type="deberta-v2", relative_attention=False, pos_att_type="p2c"), None),
        (
            dict(model_type="deberta-v2", relative_attention=True, pos_att_type="p2c"),
            "the position-to-content terms left out",
        ),
        (dict(model_type="mpt", attn_config=dict(alibi=True, clip_qkv=None)), None),
        (
            dict(model_type="mpt", attn_config=dict(clip_qkv=6, rope=True)),
            "the clipping of queries and keys (clip_qkv), rotary positions (attn_config.rope) left out",
        ),
    ],
)
def test_what_is_left_out_is_said(config, words):
    family = find_family(Config(config), [])
    assert family.partial is not None
    assert family.partial(Config(config)) == words
