"""What a scan says it covers is true: attention that no row reads is counted, and a family known by names says so."""

import json
import re

import gguf
import peft
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from test_edited_tensors import Held
from test_quantised import FILES, stored, write

from family_cases import CASES
from locater import Live, Stored, checkpoints, scan
from locater.errors import Refusal
from locater.models import Config, open_model
from locater.models.live import AS_NAMED

pytestmark = pytest.mark.quick


def saved(name, folder):
    case = next(case for case in CASES if case.name == name)
    case.save(case.build(), folder)
    return folder


def add(folder, **tensors):
    stored = load_file(folder / "model.safetensors") | {
        name.replace("__", "."): value for name, value in tensors.items()
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def without_type(folder):
    config = json.loads((folder / "config.json").read_text())
    config.pop("model_type")
    (folder / "config.json").write_text(json.dumps(config))


def test_a_decoder_that_no_row_reads_is_counted(tmp_path):
    folder = saved("bert", tmp_path)
    assert scan(folder).coverage == "COMPLETE"
    add(
        folder,
        decoder__layers__0__self_attn__q_proj__weight=torch.ones(4, 4),
        decoder__layers__1__self_attn__q_proj__weight=torch.ones(4, 4),
        decoder__layers__0__self_attn__q_norm__weight=torch.ones(4),
    )
    found = scan(folder).coverage
    assert (
        found.startswith("PARTIAL") and "2 further tensors that look like queries, such as `decoder.layers.0" in found
    )


def test_a_config_without_a_type_is_read_by_the_names_of_one_family(tmp_path):
    folder = saved("bert", tmp_path)
    before = scan(folder)
    without_type(folder)
    found = scan(folder)
    assert found.heads == before.heads and found.family == "bert"
    assert found.coverage == "by its tensor names, as bert, not run"


def test_names_of_many_families_are_not_guessed_at(tmp_path):
    folder = saved("llama", tmp_path)
    without_type(folder)
    with pytest.raises(Refusal, match="no model type"):
        scan(folder)


def test_a_layout_never_offers_a_norm_or_what_is_not_there(tmp_path):
    stored = {
        "blocks.0.attn.query_layernorm.weight": torch.ones(4),
        "blocks.0.attn.query_layernorm.bias": torch.ones(4),
        "blocks.0.attn.wq.weight": torch.ones(4, 4),
        "blocks.0.attn.other.weight": torch.ones(4, 4),
    }
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refusal) as refused:
        scan(tmp_path)
    layout = str(refused.value).partition("to be completed")[2]
    assert "query: blocks.{layer}.attn.wq\n" in layout
    (row,) = yaml.safe_load(layout.partition("\n")[2])["attention"]
    assert (row["layers"], row["key"], row["heads"]) == (1, None, None)
    assert "layernorm" not in str(row) and "name: 'blocks.{layer}.attn.query_layernorm'" in layout  # as a question
    (tmp_path / "config.json").write_text('{"n_heads": 2, "head_dim": 2}')
    with pytest.raises(Refusal) as refused:
        scan(tmp_path)
    (row,) = yaml.safe_load(str(refused.value).partition("to be completed:\n")[2])["attention"]
    assert (row["heads"], row["key_heads"], row["d_head"]) == (2, 2, 2)


# ------------------------------------------------------------------------------------ COMPLETE is earned, each way
def set_config(folder, **entries):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))


def line(folder, **options):
    try:
        kind = Live if isinstance(folder, torch.nn.Module) else Stored
        return scan(kind(folder, **options), length=16).coverage
    except Refusal as reason:
        return f"refused: {reason}"


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert", "gpt2"])
def test_by_the_table(name, tmp_path):
    assert line(saved(name, tmp_path)) == "COMPLETE"
    for entry in (
        dict(attn_logit_multiplier=3.0),
        dict(nested={"qk_clip_value": 2}),
        dict(per_layer_config={"1": {"rms_norm_eps": 0.3}}),
        dict(auto_map={"AutoModel": "a.B"}),
    ):
        before = (tmp_path / "config.json").read_text()
        set_config(tmp_path, **entry)
        found = line(tmp_path)
        assert found.startswith("PARTIAL") and ("not read in the config" in found or "auto_map: a.B" in found)
        (tmp_path / "config.json").write_text(before)
    set_config(tmp_path, architectures=["LlamaBiModelOfMine"])
    assert "the class LlamaBiModelOfMine is not known" in line(tmp_path)


# What code of other packages calls a term of the logits, or what stands before them; transformers' own reads none.
ENTRIES = {
    "qk_gain": 2.0, "softmax_scale": 0.3, "logits_temp": 2.0, "logit_cap": 30.0, "use_gated_qk": True,
    "position_scale": 4.0, "key_multiplier": 2.0, "score_function": "sigmoid", "use_alibi_bias": True,
    "bidirectional": True, "dilation": [1, 2], "mscale": 3.0, "ntk_alpha": 1000.0, "attention_type": "linear",
    "sdpa_scale": 2.0, "softmax_offset": 1.0, "query_scale": 2.0, "head_scale": [1, 2], "normalize_qk": True,
    "pos_encoding": "alibi", "kv_shared_layers": 1, "attention_windows": [3, 9], "log_n_scaling": True,
    "use_logn": True, "token_shift": True, "hadamard": True, "pos_type": "alibi", "norm_plus_one": True,
    "use_rmsnorm": True, "max_logit": 50, "mixture_of_heads": True, "normalization": "layernorm", "pre_norm": True,
    "use_mup": True, "use_rope": False,
}  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "qwen3"])
def test_no_setting_that_tells_by_its_name_is_passed_over(name, tmp_path):
    before = (saved(name, tmp_path) / "config.json").read_text()
    for key, value in ENTRIES.items():
        (tmp_path / "config.json").write_text(json.dumps(json.loads(before) | {key: value}))
        assert f"not read in the config: `{key}`" in line(tmp_path), key


def test_tensors_of_the_table_that_are_unread(tmp_path):
    before = load_file(saved("llama", tmp_path) / "model.safetensors")
    inside = (
        "mystery",
        "q_gain",
        "head_temperature",
        "rope_scale",
        "k_rope_norm.weight",
        "bias_table",
        "q_proj.pre_scale",
    )
    beside = ("q_temperature.weight", "pos_bias.weight", "pre_attention_rotation.weight", "qk_shift", "attn_bias_table")
    beside += ("qk_norm.weight", "q_norm.weight", "norm_q.weight", "ln_k.weight")
    in_layer = [f"model.layers.0.{name}" for name in (*beside, *(f"self_attn.{name}" for name in inside))]
    for name in [*in_layer, "model.alibi_slopes", "model.relative_attention_bias.weight", "pos_bias.weight", "sinks"]:
        planted = {name: torch.ones(4)}
        save_file(before | planted, tmp_path / "model.safetensors", metadata={"format": "pt"})
        assert line(tmp_path).startswith("PARTIAL") and f"`{next(iter(planted))}`" in line(tmp_path)


def test_by_the_layout(tmp_path):
    weights = {f"b.{n}.{side}.weight": torch.randn(8, 8) for n in range(2) for side in ("attn.wq", "attn.wk")}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    layout = tmp_path / "layout.yaml"
    names = "query: 'b.{layer}.attn.wq', key: 'b.{layer}.attn.wk', prefixes: ['']"
    row = f"{{block: decoder, {names}, layers: 2, heads: 2, d_head: 4}}"
    layout.write_text(f"attention: [{row}]")
    assert line(tmp_path, layout=layout) == "by the layout, not run"
    (tmp_path / "config.json").write_text('{"rope_theta": 1e4}')
    assert "not read in the config: `rope_theta`" in line(tmp_path, layout=layout)
    save_file(weights | {"b.0.attn.mystery.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert "not in the heads: `b.0.attn.mystery.weight`" in line(tmp_path, layout=layout)


@pytest.mark.parametrize("with_sample", [False, True])
def test_live(with_sample):
    case = next(case for case in CASES if case.name == "llama")
    model = case.build()
    sample = case.inputs(model.config) if with_sample else None
    assert line(model, sample=sample).startswith("COMPLETE" if with_sample else "by the table, not run")
    model.model.layers[0].self_attn.scaling = 0.5
    assert line(model, sample=sample).startswith("PARTIAL") or with_sample
    model.model.layers[0].self_attn.register_parameter("mystery", torch.nn.Parameter(torch.ones(3)))
    assert "not in the heads: `model.layers.0.self_attn.mystery`" in line(model, sample=sample)


def test_named_projections_are_complete_only_if_a_pass_has_shown_it():
    attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    assert line(attention, heads=[("out_proj", 4, 0)]).startswith("refused")
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    found = line(model, heads=[("0", "1", 2, 2)])
    assert found == AS_NAMED and "queries after the projection is not in η" in found
    found = line(model, heads=[("0", "1", 2, 2)], sample=torch.ones(1, 3, 16))
    assert found == AS_NAMED and "queries after the projection is not in η" in found


def test_with_an_adapter(tmp_path):
    case = next(case for case in CASES if case.name == "llama")
    base, folder = tmp_path / "base", tmp_path / "adapter"
    model = case.build()
    case.save(model, base)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder)
    assert line(base, adapter=folder) == "COMPLETE"
    path = folder / "adapter_config.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | {"mystery_scale": 3.0}))
    assert not line(base, adapter=folder).startswith("COMPLETE")
    path.write_text(before)
    stored = load_file(folder / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.mystery.weight"
    save_file(stored | {name: torch.ones(2, 2)}, folder / "adapter_model.safetensors")
    assert not line(base, adapter=folder).startswith("COMPLETE")


@pytest.mark.parametrize("path", FILES[:4], ids=lambda path: path.stem)
def test_of_quantised_weights(path, tmp_path):
    tensors, _, notes = stored(path)
    settings = json.loads(notes.pop("quantization_config"))
    assert line(write(tmp_path, tensors, settings, notes)) == "COMPLETE"
    set_config(tmp_path, attn_logit_multiplier=3.0)
    assert "not read in the config: `attn_logit_multiplier`" in line(tmp_path)
    write(tmp_path, tensors | {"model.layers.0.self_attn.mystery": torch.ones(4)}, settings, notes)
    assert not line(tmp_path).startswith("COMPLETE")


@pytest.mark.parametrize("planted", [None, "tensor", "attention.mystery_scale", "rope.mystery", "attention.scale"])
def test_of_gguf(planted, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    if planted not in (None, "tensor"):
        writer.add_float32(f"llama.{planted}", 3.0)
    sizes = {"attn_q.weight": (64, 64), "attn_k.weight": (32, 64), "attn_norm.weight": (64,)}
    sizes |= {"attn_mystery.weight": (64,)} if planted == "tensor" else {}
    for name, size in sizes.items():
        writer.add_tensor(f"blk.0.{name}", torch.rand(size).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert (line(tmp_path / "x.gguf") == "COMPLETE") == (planted is None), line(tmp_path / "x.gguf")


# ----------------------------------------------------------------------------- known by names only if all is known
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_model_of_any_family_without_its_type_is_read_alike_or_refused(case, tmp_path):
    case.save(case.build(), tmp_path)
    with checkpoints.open(tmp_path) as checkpoint:
        declared = {key: value for key, value in checkpoint.config.items()}
        config = {key: value for key, value in declared.items() if key not in ("model_type", "architectures")}
        try:
            opened = open_model(Config(config), checkpoint)
            layers = list(opened.layers())
        except Refusal:
            return
        if any(layer.refused for layer in layers):
            return
        assert not str(opened.coverage).startswith("COMPLETE")
        expected = list(open_model(Config(declared), checkpoint).layers())
    assert len(layers) == len(expected)
    for layer, other in zip(layers, expected, strict=True):
        x = torch.randn(1, 5, layer.heads[0].d_model)
        for head, theirs in zip(layer.heads, other.heads, strict=True):
            torch.testing.assert_close(head.folded().logits(x, x), theirs.folded().logits(x, x))


WIDTH = 16
NANO = {"ln_1": (WIDTH,), "attn.c_attn": (3 * WIDTH, WIDTH), "attn.c_proj": (WIDTH, WIDTH), "ln_2": (WIDTH,)}
NANO |= {"mlp.c_fc": (4 * WIDTH, WIDTH), "mlp.c_proj": (WIDTH, 4 * WIDTH)}


def nano(bias=True):
    tensors = {f"transformer.h.{n}.{name}.weight": torch.randn(size) for n in range(2) for name, size in NANO.items()}
    if bias:
        tensors |= {name.replace("weight", "bias"): torch.ones(len(value)) for name, value in tensors.items()}
    return tensors | {"transformer.wte.weight": torch.ones(9, WIDTH), "transformer.wpe.weight": torch.ones(9, WIDTH)}


SIZES = dict(n_layer=2, n_head=2, n_embd=WIDTH, block_size=9)
OTHERS = [
    ("rotary, RMS norms", "wpe|bias", (), {}),
    ("rotary", "wpe", (), {}),
    ("RMS norms", "bias", (), {}),
    ("RMS norms, as told otherwise", r"\bbias", (), dict(bias=True)),
    ("norms of queries", "", ("transformer.h.0.attn.q_norm.weight",), {}),
    ("a sink", "", ("transformer.h.1.attn.sinks",), {}),
    ("relative positions", "", ("transformer.h.0.attn.rel_pos_bias.weight",), {}),
    ("a gated feed-forward", "", ("transformer.h.0.mlp.c_gate.weight",), {}),
    ("another feed-forward", r"mlp\.", ("transformer.h.0.ffn.up.weight", "transformer.h.1.ffn.up.weight"), {}),
    ("cross-attention", "", ("transformer.h.0.crossattention.c_attn.weight",), {}),
    ("no second norm", "ln_2", (), {}),
    ("no word of nanoGPT's", "", (), dict(block_size=None)),
]


@pytest.mark.parametrize(("what", "lost", "more", "entries"), OTHERS, ids=[other[0] for other in OTHERS])
def test_what_only_resembles_nanogpt_is_refused_with_a_layout(what, lost, more, entries, tmp_path):
    tensors = {name: value for name, value in nano().items() if not (lost and re.search(lost, name))}
    tensors |= {name: torch.ones(WIDTH) for name in more}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SIZES | entries))
    with pytest.raises(Refusal) as refused:
        scan(tmp_path)
    assert "resemble" in str(refused.value) or "block_size" in str(refused.value)
    if "to be completed" in str(refused.value):
        layout = tmp_path / "layout.yaml"
        layout.write_text(str(refused.value).partition("to be completed:\n")[2])
        (row,) = yaml.safe_load(layout.read_text())["attention"]
        assert {"rotary", "input_norm", "d_head", "heads"} <= set(row) and row["heads"] == 2
        with pytest.raises(Refusal, match="input_norm"):
            scan(Stored(tmp_path, layout=layout))
        answers = {"input_norm": {"kind": "rms", "name": "transformer.h.{layer}.ln_1"}, "rotary": {"base": 100.0}}
        answers |= {"d_head": WIDTH // 2} | {name: None for name in ("query_norm", "key_norm") if name in row}
        layout.write_text(yaml.safe_dump({"attention": [row | answers]}))
        assert len(scan(Stored(tmp_path, layout=layout)).heads) == 4


@pytest.mark.parametrize("name", [None, "nanogpt"])
def test_nanogpt_itself_is_read_by_its_names(name):
    config = SIZES | ({} if name is None else {"model_type": name})
    assert str(open_model(Config(config), Held(nano())).coverage) == "by its tensor names, as nanogpt, not run"
    config |= dict(bias=False)
    assert open_model(Config(config), Held(nano(bias=False))).family == "nanogpt"
    config |= dict(rope_theta=1e4)
    assert "not read in the config: `rope_theta`" in str(open_model(Config(config), Held(nano(bias=False))).coverage)


@pytest.mark.parametrize(
    "entries", [dict(norm="rms"), dict(n_kv_head=2), dict(mup=True), dict(causal=False), dict(pos_emb="sin")], ids=str
)
def test_what_an_undeclared_models_config_says_beside_is_told(entries):
    line = str(open_model(Config(SIZES | entries), Held(nano())).coverage)
    assert f"not read in the config: `{next(iter(entries))}`" in line


def test_a_rotary_table_beside_the_blocks_of_nanogpt_is_refused():
    with pytest.raises(Refusal, match="rotary.freqs`, where the positions of nanogpt are not rotary"):
        open_model(Config(SIZES), Held(nano() | {"transformer.rotary.freqs": torch.ones(4)}))


def test_the_number_of_heads_is_found_at_any_depth():
    layer = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, 32), 2)
    held = Held(dict(layer.state_dict()))
    config = {"model": {"class_path": "my.Model", "init_args": {"nhead": 4, "d_model": 16}}, "trainer": {"devices": 1}}
    opened = open_model(Config(config), held)
    assert opened.stacks[0][0].shape.num_heads == 4
    with pytest.raises(Refusal, match="one value of `nhead`"):
        _ = open_model(Config(config | {"other": {"init_args": {"nhead": 2}}}), held).stacks[0][0].shape
