"""GGUF: tiny models written as llama.cpp's converter would, read by us and by transformers' own loader."""

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from locater import checkpoints
from locater.checkpoints.gguf import llama3_factors
from locater.errors import Refusal

pytestmark = pytest.mark.quick

SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
GROUPED = SIZES | dict(num_key_value_heads=2, max_position_embeddings=128)
SPECIAL = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What the converter does to rotary rows: halves become pairs."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def change_llama(name, tensor, config):
    if "q_proj" in name:
        return permute(tensor, config.num_attention_heads)
    return permute(tensor, config.num_key_value_heads) if "k_proj" in name else tensor


def change_norms(name, tensor, config):
    return tensor + 1 if name.endswith("norm.weight") else tensor


def change_gpt2(name, tensor, config):
    return tensor.T if ".c_" in name and name.endswith("weight") else tensor


def change_fused(name, tensor, config):
    """Per head q, k, v to all q, all k, all v."""
    if "query_key_value" not in name:
        return tensor
    heads = config.num_attention_heads
    return tensor.reshape(heads, 3, -1, *tensor.shape[1:]).swapaxes(0, 1).reshape(tensor.shape)


def change_falcon(name, tensor, config):
    """Per group its queries, key, value to all q, all k, all v."""
    if "query_key_value" not in name:
        return tensor
    groups = config.num_kv_heads if config.new_decoder_architecture else 1
    width = config.hidden_size // config.num_attention_heads
    parts = tensor.reshape(groups, -1, width, *tensor.shape[1:])
    return torch.cat([part.flatten(0, 2) for part in (parts[:, :-2], parts[:, -2:-1], parts[:, -1:])])


def keep(name, tensor, config):
    return tensor


FALCON = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, alibi=False, **SPECIAL)
# model type, architecture in the file, settings, what the converter does, and whether transformers reads it.
MODELS = {
    "llama": ("llama", dict(GROUPED, head_dim=16, tie_word_embeddings=False), change_llama, True),
    "llama-bias": ("llama", dict(GROUPED, head_dim=16, attention_bias=True), change_llama, False),
    "mistral": ("llama", dict(GROUPED, head_dim=16, sliding_window=None), change_llama, True),
    "granite": ("granite", dict(GROUPED, attention_multiplier=0.3), change_llama, False),
    "qwen2": ("qwen2", GROUPED, keep, True),
    "qwen3": ("qwen3", dict(GROUPED, head_dim=32), keep, True),
    "gemma": ("gemma", dict(GROUPED, head_dim=32), change_norms, False),
    "gemma2": ("gemma2", dict(GROUPED, head_dim=32, query_pre_attn_scalar=32), change_norms, True),
    "gemma3_text": ("gemma3", dict(GROUPED, head_dim=32, query_pre_attn_scalar=32), change_norms, True),
    "phi": ("phi2", dict(SIZES, partial_rotary_factor=0.5), keep, False),
    "phi3": ("phi3", dict(GROUPED, **SPECIAL), keep, True),
    "gpt2": (
        "gpt2",
        dict(n_embd=64, n_layer=2, n_head=4, vocab_size=64, n_positions=128, **SPECIAL),
        change_gpt2,
        True,
    ),
    "bloom": ("bloom", dict(hidden_size=64, n_layer=2, n_head=4, vocab_size=64, **SPECIAL), change_fused, True),
    "gpt_neox": ("gptneox", dict(SIZES, rotary_pct=0.25), change_fused, False),
    "falcon": ("falcon", dict(FALCON, multi_query=True, new_decoder_architecture=False), change_falcon, True),
    "falcon-groups": ("falcon", dict(FALCON, num_kv_heads=2, new_decoder_architecture=True), change_falcon, False),
    "mpt": ("mpt", dict(d_model=64, n_layers=2, n_heads=4, vocab_size=64), keep, False),
    "starcoder2": ("starcoder2", GROUPED, keep, True),
    "stablelm": ("stablelm", dict(GROUPED, use_qkv_bias=True, partial_rotary_factor=0.5, **SPECIAL), keep, True),
    "nemotron": ("nemotron", dict(GROUPED, partial_rotary_factor=0.5), change_norms, False),
    "cohere": ("command-r", dict(GROUPED, use_qk_norm=False, **SPECIAL), keep, False),
    "olmo2": ("olmo2", dict(GROUPED, **SPECIAL), keep, False),
    "starcoder": ("starcoder", dict(n_embd=64, n_layer=2, n_head=4, vocab_size=64, **SPECIAL), keep, False),
}
TYPES = {"llama-bias": "llama", "falcon-groups": "falcon", "starcoder": "gpt_bigcode"}
# What the files say and transformers' loader leaves at its default, which real files of these types happen to have.
FORGOTTEN = {
    "qwen3": dict(head_dim=32),
    "gemma2": dict(query_pre_attn_scalar=32),
    "gemma3_text": dict(query_pre_attn_scalar=32),
    "gpt2": dict(n_positions=128),
    "starcoder2": dict(rope_parameters=dict(rope_type="default", rope_theta=12345.0)),
    "stablelm": dict(rope_parameters=dict(rope_type="default", rope_theta=12345.0, partial_rotary_factor=0.5)),
}


def make_model(name: str):
    torch.manual_seed(0)
    config = AutoConfig.for_model(TYPES.get(name, name), **MODELS[name][1])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def write_settings(writer: gguf.GGUFWriter, config) -> None:
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    partial = getattr(config, "rope_parameters", None) or {}
    fraction = partial.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None) or 1.0)
    writer.add_name("mistral tiny" if config.model_type == "mistral" else "tiny")
    writer.add_context_length(getattr(config, "max_position_embeddings", 128))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    writer.add_head_count(heads)
    is_grouped = not getattr(config, "multi_query", False) or getattr(config, "new_decoder_architecture", False)
    writer.add_head_count_kv(keys if is_grouped else 1)
    writer.add_pad_token_id(0)
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * fraction))
    writer.add_rope_freq_base(12345.0)
    writer.add_layer_norm_eps(1e-4)
    writer.add_layer_norm_rms_eps(1e-4)
    writer.add_vocab_size(config.vocab_size)
    # Some converters write no size, so transformers counts these.
    writer.add_token_list([f"token {number}" for number in range(config.vocab_size)])
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)


def write_model(name: str, path):
    """The file, and what the model itself would save."""
    architecture, _, change, _ = MODELS[name]
    model = make_model(name)
    weights = {key: value for key, value in model.state_dict().items() if not key.endswith("attn.bias")}
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    weights = {
        key: value for key, value in weights.items() if not (tied and key in ("lm_head.weight", "embed_out.weight"))
    }
    if name == "gpt_neox":  # what stands on disk, whatever a release of transformers calls it in memory
        weights["embed_out.weight"] = weights.pop("lm_head.weight")
    kinds = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], model.config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    write_settings(writer, model.config)
    for key, value in weights.items():
        # The converter drops this prefix of BLOOM's before it looks names up.
        looked_up = key.removeprefix("transformer.") if name == "bloom" else key
        stored = names.get_name(looked_up, try_suffixes=(".weight", ".bias"))
        assert stored is not None, key
        writer.add_tensor(stored, change(key, value, model.config).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, weights


@pytest.mark.parametrize("name", MODELS)
def test_names_and_numbers_are_the_models_own(name, tmp_path):
    model, weights = write_model(name, tmp_path / "x.gguf")
    with checkpoints.open(tmp_path / "x.gguf") as checkpoint:
        assert checkpoint.format == "gguf" and set(checkpoint.names) == set(weights)
        for key, value in weights.items():
            assert checkpoint.shape(key) == value.shape
            # Adding and taking away one costs the last bits.
            torch.testing.assert_close(checkpoint.read(key), value, rtol=0, atol=1e-6)
            stop = min(39, len(value))
            torch.testing.assert_close(checkpoint.read(key, rows=(5, stop)), value[5:stop], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_config_is_the_models_own(name, tmp_path):
    model, _ = write_model(name, tmp_path / "x.gguf")
    with checkpoints.open(tmp_path / "x.gguf") as checkpoint:
        config = checkpoint.config
    rebuilt = AutoConfig.for_model(**config)
    apart = {"attention_multiplier", "tie_word_embeddings", "partial_rotary_factor", "rotary_pct", "multi_query"}
    keys = set(MODELS[name][1]) - set(SPECIAL) - apart
    assert config["model_type"] == model.config.model_type
    for key in keys:
        assert getattr(rebuilt, key) == getattr(model.config, key), key
    wanted, got = (getattr(one, "rope_parameters", None) or {} for one in (model.config, rebuilt))
    assert got.get("partial_rotary_factor", 1.0) == wanted.get("partial_rotary_factor", 1.0)
    if name == "granite":
        assert config["attention_multiplier"] == pytest.approx(0.3)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert config["tie_word_embeddings"] == tied
    if "rope_theta" in config:
        assert config["rope_theta"] == 12345.0


def load(name, folder):
    """The file as transformers reads it."""
    transformers.utils.logging.disable_progress_bar()
    settings = FORGOTTEN.get(name, {})
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file="x.gguf", dtype=torch.float32, **settings)


@pytest.mark.parametrize("name", [name for name, row in MODELS.items() if row[3]])
def test_agrees_with_transformers(name, tmp_path):
    write_model(name, tmp_path / "x.gguf")
    loaded = load(name, tmp_path).state_dict()
    with checkpoints.open(tmp_path / "x.gguf") as checkpoint:
        for key in checkpoint.names:
            torch.testing.assert_close(checkpoint.read(key), loaded[key], rtol=0, atol=1e-6)


def write_raw(path, tensors: dict, architecture: str = "llama", **settings) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_head_count(settings.pop("heads", 4))
    for key, value in settings.items():
        getattr(writer, f"add_{key}")(value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


PACKED = [kind for kind in gguf.GGML_QUANT_SIZES if hasattr(gguf.quants, kind.name) and kind.name != "BF16"]


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
def test_every_packed_kind(kind, tmp_path):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (12, 2 * size), dtype=np.uint8)
    write_raw(tmp_path / "x.gguf", {"blk.0.attn_q.weight": (data, kind)}, "qwen2")
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.quants.dequantize(data, kind))
    with checkpoints.open(tmp_path / "x.gguf") as checkpoint:
        name = "model.layers.0.self_attn.q_proj.weight"
        assert checkpoint.shape(name) == (12, 2 * block) == expected.shape
        torch.testing.assert_close(checkpoint.read(name), expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(checkpoint.read(name, rows=(3, 7)), expected[3:7], rtol=0, atol=0, equal_nan=True)


def test_half_precision_kinds(tmp_path):
    values = torch.randn(6, 8)
    stored = values.bfloat16().view(torch.uint8).numpy()
    write_raw(tmp_path / "x.gguf", {"a": (values.half().numpy(), None), "b": (stored, gguf.GGMLQuantizationType.BF16)})
    with checkpoints.open(tmp_path / "x.gguf") as checkpoint:
        assert checkpoint.read("a").equal(values.half()) and checkpoint.read("b", (2, 4)).equal(values.bfloat16()[2:4])


def test_latent_maps_are_joined(tmp_path):
    heads, rank, nope, value = 4, 8, 6, 5
    whole = torch.randn(heads * (nope + value), rank)
    key_map, value_map = whole.reshape(heads, nope + value, rank).split([nope, value], dim=1)
    tensors = {"blk.0.attn_k_b.weight": (key_map.transpose(1, 2).contiguous().numpy(), None),
               "blk.0.attn_v_b.weight": (value_map.contiguous().numpy(), None)}  # fmt: skip
    settings = dict(key_length_mla=9, value_length_mla=value, rope_dimension_count=3, kv_lora_rank=rank)
    write_raw(tmp_path / "x.gguf", tensors, "deepseek2", **settings)
    with checkpoints.open(tmp_path / "x.gguf") as checkpoint:
        name = "model.layers.0.self_attn.kv_b_proj.weight"
        assert checkpoint.read(name).equal(whole) and checkpoint.read(name, rows=(7, 20)).equal(whole[7:20])
        expected = dict(
            qk_nope_head_dim=nope, qk_rope_head_dim=3, v_head_dim=value, kv_lora_rank=rank, q_lora_rank=None
        )
        assert expected.items() <= checkpoint.config.items()


def test_llama3_scaling_is_recovered(tmp_path):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    wanted = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)
    wanted["original_max_position_embeddings"] = 8192
    settings = dict(GROUPED, head_dim=16, rope_parameters=wanted | {"rope_theta": 500_000.0})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](transformers.LlamaConfig(**settings), device="cpu")
    factors = 1 / (500_000.0 ** (torch.arange(8) / 8)) / scaled
    torch.testing.assert_close(llama3_factors(8, theta=500_000.0, factor=32.0), factors, rtol=1e-5, atol=0)
    write_raw(tmp_path / "x.gguf", {"rope_freqs.weight": (factors.numpy(), None)}, rope_freq_base=500_000.0)
    with checkpoints.open(tmp_path / "x.gguf") as checkpoint:
        assert checkpoint.config["rope_scaling"] == pytest.approx(wanted)


def test_factors_of_another_rule_are_refused(tmp_path):
    write_raw(tmp_path / "x.gguf", {"rope_freqs.weight": (np.linspace(1, 3, 8, dtype=np.float32), None)})
    with pytest.raises(Refusal, match="Llama 3's factors in rope_freqs.weight, got others"):
        checkpoints.open(tmp_path / "x.gguf")


def test_split_files(tmp_path):
    write_raw(tmp_path / "m-00001-of-00002.gguf", {"output.weight": (np.ones((2, 4), np.float32), None)})
    write_raw(tmp_path / "m-00002-of-00002.gguf", {"token_embd.weight": (np.zeros((2, 4), np.float32), None)})
    for source in (tmp_path, tmp_path / "m-00001-of-00002.gguf"):
        with checkpoints.open(source) as checkpoint:
            assert set(checkpoint.names) == {"lm_head.weight", "model.embed_tokens.weight"}
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(Refusal, match="no m-00002-of-00002.gguf"):
        checkpoints.open(tmp_path / "m-00001-of-00002.gguf")


def header(*parts: bytes, tensors: int = 0, settings: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + version.to_bytes(4, "little") + u64(tensors) + u64(settings) + b"".join(parts) + bytes(64)


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def text(value: str) -> bytes:
    return u64(len(value)) + value.encode()


ARCHITECTURE = text("general.architecture") + u32(8) + text("llama")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGML" + bytes(60), "not a GGUF file"),
        (header(version=1), "convert it again"),
        (header(tensors=2**63), "at most . tensors"),
        (header(settings=2**60), "at most . settings"),
        (header(u64(2**62), settings=1), "bytes of text"),
        (header(text("a") + u32(9) + u32(4) + u64(2**61), settings=1), "items of a list"),
        (header(text("a") + u32(9) + u32(9) + u64(1) + u32(9) + u64(1), settings=1), "a known kind of setting"),
        (header(text("a") + u32(77), settings=1), "a known kind of setting"),
        (header(text("a") + u32(0) + b"1" + text("a") + u32(0) + b"1", settings=2), "'a' twice"),
        (header(u64(2) + b"\xff\xff" + u32(0) + b"1", settings=1), "UTF-8"),
        (header(text("x") + u32(2**31), tensors=1), "at most 8 dimensions"),
        (header(text("x") + u32(2) + u64(2**40) + u64(2**40) + u32(0) + u64(0), tensors=1), "'x' within"),
        (header(text("x") + u32(1) + u64(4) + u32(0) + u64(2**50), tensors=1), "'x' within"),
        (header(ARCHITECTURE, text("x") + u32(1) + u64(4) + u32(0) + u64(50), tensors=1, settings=1), "to hold bytes"),
        (header(ARCHITECTURE, text("x") + u32(1) + u64(4) + u32(99) + u64(0), tensors=1, settings=1), "known kind"),
        (header(ARCHITECTURE, text("x") + u32(1) + u64(5) + u32(2) + u64(0), tensors=1, settings=1), "whole blocks"),
        (header(ARCHITECTURE, 2 * (text("x") + u32(1) + u64(4) + u32(0) + u64(0)), tensors=2, settings=1), "twice"),
        (header(ARCHITECTURE, *(text(n) + u32(1) + u64(4) + u32(0) + u64(0) for n in "xy"), tensors=2, settings=1),
         "an overlap"),
        (header(text("x") + u32(1) + u64(4) + u32(0) + u64(0), tensors=1), "general.architecture"),
        (header(ARCHITECTURE, settings=1), "tensors in"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path, data, message):
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(Refusal, match=message) as caught:
        checkpoints.open(tmp_path / "x.gguf")
    assert "\n" not in str(caught.value)


def test_heads_that_do_not_divide_the_rows(tmp_path):
    write_raw(tmp_path / "x.gguf", {"blk.0.attn_q.weight": (np.ones((6, 4), np.float32), None)}, heads=4)
    with pytest.raises(Refusal, match="rows for 4 heads"):
        checkpoints.open(tmp_path / "x.gguf")


def test_missing_extra(tmp_path, monkeypatch):
    import sys

    from locater.checkpoints import gguf as reader

    kind = gguf.GGMLQuantizationType.Q8_0
    write_raw(tmp_path / "x.gguf", {"a": (np.zeros((2, 34), np.uint8), kind)})
    reader._packed_sizes.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(Refusal, match=r'pip install "locater\[gguf\]"'):
        checkpoints.open(tmp_path / "x.gguf")
