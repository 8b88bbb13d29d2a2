"""COMPLETE is earned by lists: a tensor or entry that a type's own code does not have is named, whatever its name."""

import random
import string
from functools import cache

import pytest

from family_cases import CASES
from locater import checkpoints
from locater.models import Config, find_family, open_model
from locater.models.coverage import asked_by_rows
from locater.models.neighbours import asked_for, listed_entries
from saved_models import case_named

pytestmark = pytest.mark.quick

# A layer, its attention, its feed-forward part, the norms in it that heads read.
PLACES = {
    "llama": ("model.layers.0", "self_attn", "mlp", "input_layernorm"),
    "qwen3": ("model.layers.1", "self_attn", "mlp", "input_layernorm"),
    "gemma2": ("model.layers.1", "self_attn", "mlp", "input_layernorm"),
    "gpt2": ("transformer.h.1", "attn", "mlp", "ln_1"),
    "gpt-neox": ("gpt_neox.layers.0", "attention", "mlp", "input_layernorm"),
    "opt": ("model.decoder.layers.1", "self_attn", "self_attn", "self_attn_layer_norm"),
    "bert": ("bert.encoder.layer.0", "attention.self", "intermediate", "output.LayerNorm"),
    "t5": ("decoder.block.0", "layer.0.SelfAttention", "layer.2", "layer.0.layer_norm"),
    "deepseek-v3": ("model.layers.0", "self_attn", "mlp", "input_layernorm"),
    "vit": ("vit.encoder.layer.0", "attention.attention", "attention", "layernorm_before"),
}
# Words of which people make the names of what a model learns.
WORDS = (
    "pre", "post", "norm", "input", "layernorm", "hyper", "connections", "alpha", "beta", "mix", "gate", "scale",
    "depth", "residual", "router", "map", "proj", "extra", "memory", "token", "shift", "conv", "lambda", "bias",
    "table", "state", "low", "rank", "a", "b", "x", "2",
)  # fmt: skip
TIMES = 12


class Named:
    """A file's tensors by name and shape; nothing is read of them."""

    def __init__(self, shapes: dict) -> None:
        self.shapes, self.names = shapes, shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]


@cache
def saved(name: str, root) -> tuple[dict, dict]:
    case, folder = case_named(name), root / name
    folder.mkdir(exist_ok=True)
    case.save(case.build(), folder)
    with checkpoints.open(folder) as stored:
        return dict(stored.config), {name: tuple(stored.shape(name)) for name in stored.names}


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("unlisted")


def coverage(config: dict, shapes: dict) -> str:
    return str(open_model(Config(config), Named(shapes)).coverage)


def any_name(choose: random.Random) -> str:
    made = "".join(choose.choices(string.ascii_lowercase, k=choose.randint(2, 9)))
    words = [choose.choice(WORDS) for _ in range(choose.randint(1, 3))]
    return f"{choose.choice([made, '_'.join(words)])}{choose.choice(['', '.weight', '.bias', '.0.weight', '.x.scale'])}"


def planted(name: str, root) -> dict[str, str]:
    """A name in every place, and the coverage that it leaves."""
    config, shapes = saved(name, root)
    assert coverage(config, shapes) == "COMPLETE"
    layer = PLACES[name][0]
    layers = layer.rpartition(".")[0]
    within = [f"{layer}.{part}" for part in PLACES[name][1:]]
    assert all(any(one.startswith(f"{place}.") for one in shapes) for place in within)
    choose = random.Random(name)
    found = {}
    for place in (f"{layers}_more.0", layer, *within):
        for _ in range(TIMES):
            new = f"{place}.{any_name(choose)}".lstrip(".")
            if new not in shapes:
                found[new] = coverage(config, shapes | {new: (5,)})
    return found


@pytest.mark.parametrize("name", PLACES)
def test_a_tensor_of_any_name_in_any_place_of_a_layer_is_named(name, root):
    passed = [
        new for new, line in planted(name, root).items() if not line.startswith("PARTIAL") or f"`{new}`" not in line
    ]
    assert not passed


def foreign_entries(name: str, root) -> dict[str, str]:
    """Entries that rows of other types read, and the coverage that each leaves."""
    config, shapes = saved(name, root)
    family = find_family(Config(config), shapes)
    read = asked_by_rows(family, Config(config), open_model(Config(config), Named(shapes)).stacks)
    found = {}
    for key in sorted(asked_for() - {*(listed_entries(family) or ())} - read - config.keys() - {"model_type"}):
        try:
            found[key] = coverage(config | {key: 3}, shapes)
        except Exception as reason:
            found[key] = f"refused: {reason}"
    return found


@pytest.mark.parametrize("name", PLACES)
def test_an_entry_of_another_types_rows_is_named(name, root):
    lines = foreign_entries(name, root)
    assert not [key for key, line in lines.items() if line == "COMPLETE"]
    assert len(lines) > 20


# Tensors that files carry beside, which transformers' own code passes over or which act behind the softmax alone.
CARRIED = {
    "llama": (
        "model.layers.0.self_attn.rotary_emb.inv_freq", "score.weight", "lm_head.weight", "lm_head.bias",
        "model.layers.0.mlp.down_proj.weight_scale", "model.layers.1.self_attn.v_proj.weight.absmax",
        "model.layers.1.self_attn.o_proj.qzeros", "model.layers.0.mlp.up_proj.g_idx",
        "v_head.summary.weight", "linear.weight",
        "model.layers.1.self_attn.v_proj.lora_A.weight", "model.layers.0.self_attn.o_proj.weight_scale_inv",
    ),
    "gpt2": ("transformer.h.0.attn.masked_bias", "lm_head.weight", "score.weight"),
    "gpt-neox": ("gpt_neox.layers.0.attention.masked_bias", "gpt_neox.layers.0.attention.rotary_emb.inv_freq"),
    "bert": ("bert.embeddings.position_ids", "bert.pooler.dense.weight", "cls.predictions.bias", "classifier.weight"),
    "t5": ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
        "classification_head.dense.weight"),
    "deepseek-v3": ("model.layers.61.eh_proj.weight", "model.layers.61.self_attn.o_proj.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", CARRIED)
def test_what_files_carry_beside_is_not(name, root):
    config, shapes = saved(name, root)
    for new in CARRIED[name]:
        assert coverage(config, shapes | {new: (5,) if "masked" not in new else ()}) == "COMPLETE", new


# Entries of published configs that transformers' own code does not read, or that say how to train or to generate.
BOOKKEEPING = {
    "n_ctx": 1024, "output_past": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "temperature": 1.0}},
    "finetuning_task": "mrpc", "gradient_checkpointing": True, "torchscript": True, "use_bfloat16": True,
    "tokenizer_class": "BertTokenizer", "emb_size": 312, "is_llama_config": True, "temperature": 1.0, "top_k": 50,
    "transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"q4f16": "float16"}}, "unsloth_version": "2025.1",
    "directionality": "bidi", "pooler_num_attention_heads": 12, "pooler_fc_size": 768, "pretraining_tp": 2,
    "summary_first_dropout": 0.1, "sentence_transformers": {"version": "4.1", "activation_fn": "torch.nn.Sigmoid"},
    "problem_type": "regression", "label2id": {"a": 0, "norm_eps": 1}, "id2label": {"0": "qkv"},
    "model_max_length": 512,
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_bookkeeping_is_not(name, root):
    config, shapes = saved(name, root)
    for key, value in BOOKKEEPING.items():
        assert coverage(config | {key: value}, shapes) == "COMPLETE", key


def test_every_case_is_as_complete_as_it_says(root):
    """The lists are of transformers' classes; files of the doubles, and of older spellings, must pass too."""
    complete = [case.name for case in CASES if case.coverage == "COMPLETE"]
    told = {name: coverage(*saved(name, root)) for name in complete}
    assert {name: line for name, line in told.items() if line != "COMPLETE"} == {}
