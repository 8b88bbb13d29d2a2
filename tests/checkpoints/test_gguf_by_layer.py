"""GGUF: layers that differ, norms behind the rotation and latent heads; attention from the file is the model's own."""

import math

import gguf
import pytest
import torch
from test_checkpoints_gguf import SPECIAL
from transformers import AutoConfig, AutoModel

from locater.checkpoints.gguf import share_that_turns
from locater.errors import Refusal
from locater.scanning.scan import scan
from saved_models import heads_of

SIZES = SPECIAL | dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, vocab_size=200)
SIZES |= dict(num_key_value_heads=2, num_hidden_layers=2, head_dim=16, max_position_embeddings=128)
EXPERTS = dict(n_routed_experts=4, num_experts=4, num_experts_per_tok=2, moe_topk=2, moe_intermediate_size=32)
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
SLIDES = [kind == "sliding_attention" for kind in KINDS]
PLAIN = dict(rope_type="default", rope_theta=123.0)
YARN = dict(rope_type="yarn", rope_theta=1234.0, factor=8.0, original_max_position_embeddings=16, beta_fast=24.0)
RANKS = dict(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12)
LATENT = EXPERTS | RANKS | dict(num_key_value_heads=4, n_group=1, topk_group=1, n_shared_experts=1)
MODELS = {
    "hunyuan-dense": ("hunyuan_v1_dense", dict(rope_parameters=PLAIN)),
    "hunyuan-moe": ("hunyuan_v1_moe", EXPERTS | dict(rope_parameters=PLAIN)),
    "gemma4": (
        "gemma4_text",
        dict(num_hidden_layers=4, layer_types=KINDS, sliding_window=5, hidden_size_per_layer_input=8)
        | dict(vocab_size_per_layer_input=200, global_head_dim=32, attention_k_eq_v=True, num_global_key_value_heads=1)
        | dict(
            rope_parameters={
                "sliding_attention": PLAIN,
                "full_attention": dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=4567.0),
            }
        ),
    ),
    "mimo2": (
        "mimo_v2_flash",
        dict(
            num_hidden_layers=4, layer_types=KINDS, sliding_window=5, v_head_dim=12, head_dim=24, num_key_value_heads=1
        )
        | EXPERTS
        | dict(
            rope_parameters={
                "sliding_attention": PLAIN | dict(partial_rotary_factor=0.334),
                "full_attention": PLAIN | dict(rope_theta=4567.0, partial_rotary_factor=0.334),
            }
        ),
    ),
    "mistral4": (
        "mistral4",
        LATENT | dict(rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)),
    ),
    "deepseek2": (
        "deepseek_v3",
        LATENT | dict(head_dim=8, rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=0.7)),
    ),
}
QUICK = ("gemma4", "hunyuan-dense", "deepseek2")
WRITTEN = ("self_attn", "layernorm", "embed_tokens.weight", "norm.weight")


def make(name):
    model_type, settings = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES | settings)
    model = AutoModel.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (1 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5))
            if key.endswith("embed_tokens.weight"):
                parameter.mul_(8)
    return model


def settings_of(name, writer, config):
    """As the converter writes them, by its own methods."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_context_length(128)
    writer.add_vocab_size(config.vocab_size)
    writer.add_feed_forward_length(96)
    {"gemma4": gemma4, "mimo2": mimo2, "mistral4": latent, "deepseek2": latent}.get(name, hunyuan)(writer, config)


def hunyuan(writer, config):
    """Its real models stretch by a fixed alpha, which the converter puts into the base."""
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)


def gemma4(writer, config):
    writer.add_head_count_kv([2 if slides else 1 for slides in SLIDES])
    writer.add_key_length(32)
    writer.add_key_length_swa(16)
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(8)
    writer.add_rope_dimension_count(32)
    writer.add_rope_dimension_count_swa(16)
    bases_and_windows(writer, SLIDES)
    writer.add_tensor("rope_freqs.weight", torch.tensor([1.0] * 4 + [1e30] * 12).numpy())


def mimo2(writer, config):
    """With one layer for further tokens, as later converters write them."""
    writer.add_block_count(5)
    writer.add_head_count_kv([2 if slides else 1 for slides in [*SLIDES, True]])
    writer.add_key_length(24)
    writer.add_value_length(12)
    writer.add_rope_dimension_count(int(24 * 0.334))
    writer.add_expert_count(4)
    writer.add_nextn_predict_layers(1)
    bases_and_windows(writer, [*SLIDES, True])


def bases_and_windows(writer, slides):
    writer.add_rope_freq_base(4567.0)
    writer.add_rope_freq_base_swa(123.0)
    writer.add_sliding_window(5)
    writer.add_sliding_window_pattern(slides)


def latent(writer, config):
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(24)
    writer.add_kv_lora_rank(16)
    writer.add_key_length(24)
    writer.add_value_length(16)
    writer.add_key_length_mla(16)
    writer.add_value_length_mla(12)
    writer.add_rope_dimension_count(8)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_count(4)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def tensors_of(key, value):
    """The converter's one change here: latent keys and values stored apart, the keys' map transposed."""
    if "kv_b_proj" not in key:
        return [(key, value)]
    keys, values = value.unflatten(0, (4, -1)).split([8, 12], dim=1)
    return [(key.replace("kv_b", "k_b"), keys.transpose(1, 2)), (key.replace("kv_b", "v_b"), values)]


def write(name, model, path, *, change=None):
    kinds = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    names, config = gguf.get_tensor_name_map(kinds[name], config_layers(model)), model.config
    writer = gguf.GGUFWriter(path, name)
    settings_of(name, writer, config)
    if change is not None:
        change(writer)
    for key, value in model.state_dict().items():
        if any(part in key for part in WRITTEN):
            for own, tensor in tensors_of(key, value):
                stored = names.get_name(f"model.{own}", try_suffixes=(".weight", ".bias"))
                assert stored is not None or "mlp" in own, own
                if stored is not None:
                    stored += ".weight" if stored.endswith("sinks") else ""
                    writer.add_tensor(stored, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def config_layers(model):
    return model.config.num_hidden_layers + 1


def own_attention(model):
    """The model's probabilities and what each attention module reads."""
    inputs, hooks = [], []
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            keep = lambda _, args, kwargs: inputs.append(args[0] if args else kwargs["hidden_states"])  # noqa: E731
            hooks.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    with torch.no_grad():
        found = model(torch.randint(5, 200, (2, 12)), output_attentions=True).attentions
    return list(zip(inputs, found, strict=True))


def quick(name):
    return name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", map(quick, MODELS))
def test_attention_from_the_file_is_the_models_own(name, tmp_path):
    model = make(name)
    write(name, model, tmp_path / "x.gguf")
    heads, layers = heads_of(tmp_path / "x.gguf"), own_attention(model)
    assert len(heads) == 4 * len(layers)
    for (_, number, index), head in heads.items():
        x, theirs = layers[number]
        assert theirs.std(-1).mean() > 0.02, "attention so uniform that the test would prove nothing"
        torch.testing.assert_close(head.attention(x, x), theirs[:, index], atol=1e-5, rtol=0)
    coverage = scan(tmp_path / "x.gguf", length=64).coverage
    assert coverage.startswith("PARTIAL" if name == "mistral4" else "COMPLETE"), coverage


def test_shared_keys_of_gemma4_are_refused(tmp_path):
    """As they are in safetensors: its last layers take the keys of others."""
    write("gemma4", make("gemma4"), tmp_path / "x.gguf", change=lambda writer: writer.add_shared_kv_layers(2))
    with pytest.raises(Refusal, match="gemma4_text"):
        scan(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gemma4", lambda writer: writer.add_rope_freq_base_swa(math.inf), "rope.freq_base_swa"),
        ("gemma4", lambda writer: writer.add_head_count_kv([2, 1, 2, 2]), "one number of key heads"),
        ("mimo2", lambda writer: writer.add_head_count_kv([3, 1, 3, 1, 3]), "twice as many key heads"),
        ("mimo2", lambda writer: writer.add_sliding_window_pattern([True]), "sliding_window_pattern"),
        ("deepseek2", lambda writer: writer.add_attn_temperature_scale(0.1), "without attention.temperature_scale"),
        ("gemma4", lambda writer: writer.add_clamp_kqv(8.0), "without attention.clamp_kqv"),
    ],
)
def test_settings_that_its_own_code_cannot_have_are_refused(name, change, words, tmp_path):
    write(name, make(name), tmp_path / "x.gguf", change=change)
    with pytest.raises(Refusal, match=words):
        scan(tmp_path / "x.gguf")


def test_pairs_that_turn_must_be_the_first():
    assert share_that_turns(torch.tensor([1.0, 1e30, 1e30, 1e30])) == 0.25
    for wrong in (None, torch.tensor([1e30, 1.0]), torch.tensor([1.0, 2.0]), torch.zeros(0)):
        with pytest.raises(Refusal, match="rope_freqs"):
            share_that_turns(wrong)
