"""GGUF architectures of this year: attention written under gguf's own names scans as the Hugging Face model does."""

import gguf
import pytest
import torch
from test_checkpoints_gguf import GROUPED, SPECIAL, permute
from transformers import AutoConfig, AutoModel

from locater.scanning.scan import scan
from saved_models import by_place

EXPERTS = dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
EXPERTS |= dict(n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=1.0)
EXPERTS |= dict(moe_num_experts=4, moe_k=2, moe_num_shared_experts=1)
SIZES = GROUPED | SPECIAL | dict(head_dim=16, vocab_size=200)
# Model type, settings beyond the sizes, whether the converter turns halves into pairs, how much of a head turns.
MODELS = {
    "arcee": ("arcee", {}, True, 1.0),
    "apertus": ("apertus", {}, False, 1.0),
    "seed_oss": ("seed_oss", dict(attention_bias=True), False, 1.0),
    "ernie4_5": ("ernie4_5", {}, False, 1.0),
    "ernie4_5-moe": ("ernie4_5_moe", EXPERTS, False, 1.0),
    "dots1": ("dots1", EXPERTS, False, 1.0),
    "glm4moe": ("glm4_moe", EXPERTS | dict(use_qk_norm=True, attention_bias=True), False, 0.5),
    "minimax-m2": ("minimax_m2", EXPERTS | dict(rotary_dim=8), False, 0.5),
    "qwen2vl": ("qwen2_vl_text", {}, False, 1.0),
    "qwen3vl": ("qwen3_vl_text", {}, False, 1.0),
    "qwen3vlmoe": ("qwen3_vl_moe_text", EXPERTS, False, 1.0),
    "granitemoe": ("granitemoe", EXPERTS | dict(attention_multiplier=0.3), True, 1.0),
    "jais2": ("jais2", {}, False, 1.0),
    "phimoe": ("phimoe", EXPERTS | dict(attention_bias=True), False, 1.0),
    "olmo": ("olmo", {}, True, 1.0),
    "nemotron": ("nemotron", dict(partial_rotary_factor=0.5), False, 0.5),
}
QUICK = ("dots1", "granitemoe", "olmo", "nemotron", "arcee")  # four by table, and one proof
WRITTEN = ("self_attn", "layernorm", "embed_tokens", "norm.weight")


def make(name):
    model_type, settings, _, fraction = MODELS[name]
    torch.manual_seed(0)
    rope = dict(rope_type="default", rope_theta=12345.0) | (
        {} if fraction == 1 else dict(partial_rotary_factor=fraction)
    )
    config = AutoConfig.for_model(model_type, **SIZES | settings, rope_parameters=rope)
    model = AutoModel.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def write(name, model, path):
    _, _, permuted, fraction = MODELS[name]
    kinds = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    names, config = gguf.get_tensor_name_map(kinds[name], 2), model.config
    epsilon = (
        next(getattr(config, key) for key in ("rms_norm_eps", "norm_eps", "layer_norm_eps") if hasattr(config, key))
        if name != "olmo"
        else 1e-5
    )
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(2)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(16)
    writer.add_rope_dimension_count(int(16 * fraction))
    writer.add_rope_freq_base(12345.0)
    writer.add_layer_norm_eps(epsilon)
    writer.add_layer_norm_rms_eps(epsilon)
    writer.add_context_length(128)
    writer.add_vocab_size(config.vocab_size)
    if name == "granitemoe":
        writer.add_attention_scale(config.attention_multiplier)
    for key, value in model.state_dict().items():
        if not any(part in key for part in WRITTEN):
            continue
        stored = names.get_name(f"model.{key}", try_suffixes=(".weight", ".bias"))
        assert stored is not None, key
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        turned = next((number for part, number in heads.items() if part in key and permuted), None)
        value = permute(value, turned) if turned else value
        value = value + 1 if name == "nemotron" and key.endswith("norm.weight") else value
        writer.add_tensor(stored, value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quick(name):
    return name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", map(quick, MODELS))
def test_the_file_scans_as_the_model(name, tmp_path):
    model = make(name)
    model.save_pretrained(tmp_path / "saved")
    write(name, model, tmp_path / "x.gguf")
    found, expected = (scan(tmp_path / name, length=64, details=["eigenvalues"]) for name in ("x.gguf", "saved"))
    assert found.coverage.split(":")[0].split(",")[0] == expected.coverage.split(":")[0].split(",")[0]
    assert by_place(found).keys() == by_place(expected).keys()
    for place, row in by_place(found).items():
        other = by_place(expected)[place]
        for column in (
            "trace",
            "trace_of_square",
            "frobenius_squared",
            "spread",
            "sigma",
            "localisation",
            "logit_bound",
        ):
            size = max(1.0, other.frobenius_squared if column.startswith("trace") else 0.0)
            assert getattr(row, column) == pytest.approx(getattr(other, column), rel=1e-5, abs=1e-5 * size), column
        assert (row.regime, row.temperature) == (other.regime, pytest.approx(other.temperature))
