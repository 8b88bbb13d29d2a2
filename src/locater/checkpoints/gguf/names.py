"""Tables from llama.cpp's names to those of the model's own code: one row per architecture."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...records import JsonMapping

# Settings, without the architecture in front. A row of `ARCHITECTURES` may rename them again, or drop them with None.
COMMON: dict[str, str | None] = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
}

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
SEPARATE = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
PRE_NORM = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SANDWICH = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
POST_NORM = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
LLAMA = SEPARATE | GATED | PRE_NORM
GPT_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
GPT_BLOCK = {
    "attn_norm": "ln_1",
    "ffn_norm": "ln_2",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
GPT_SETTINGS = {
    "context_length": "n_positions",
    "block_count": "n_layer",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.head_count_kv": None,
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
EMBEDDING_TOP = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
QUERY_KEY_VALUE = {
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
BERT_TOP = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}


@dataclass(frozen=True)
class Architecture:
    """How one architecture of llama.cpp is called and laid out in the model's own code."""

    model_type: str
    block: Mapping[str, str] = field(default_factory=lambda: LLAMA)
    layer: str = "model.layers.{}."
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    settings: Mapping[str, str | None] = field(default_factory=dict)
    defaults: JsonMapping = field(default_factory=dict)
    # The setting that holds rotary dimensions over head dimensions, if the model has it.
    partial_rotary: str | None = None
    is_permuted: bool = False
    has_shifted_norms: bool = False
    transposed: tuple[str, ...] = ()
    is_regrouped: bool = False


MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
LATENT = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", is_permuted=True),
    "mistral": Architecture("mistral", is_permuted=True, defaults={"sliding_window": None}),
    "granite": Architecture("granite", is_permuted=True, settings=MULTIPLIERS),
    "smollm3": Architecture("smollm3", is_permuted=True),
    "olmo": Architecture("olmo", is_permuted=True),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe"),
    "qwen3": Architecture("qwen3", LLAMA | HEAD_NORMS),
    "qwen3moe": Architecture("qwen3_moe", LLAMA | HEAD_NORMS),
    "olmo2": Architecture("olmo2", SEPARATE | GATED | POST_NORM | HEAD_NORMS),
    "olmoe": Architecture("olmoe", LLAMA | HEAD_NORMS),
    "command-r": Architecture("cohere", LLAMA | HEAD_NORMS, settings={"logit_scale": "logit_scale"}),
    "cohere2": Architecture("cohere2", settings={"logit_scale": "logit_scale"}),
    "gemma": Architecture("gemma", has_shifted_norms=True),
    "gemma2": Architecture("gemma2", SEPARATE | GATED | SANDWICH, has_shifted_norms=True),
    "gemma3": Architecture("gemma3_text", SEPARATE | GATED | SANDWICH | HEAD_NORMS, has_shifted_norms=True),
    "starcoder2": Architecture(
        "starcoder2",
        SEPARATE | PRE_NORM | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        settings={"attention.layer_norm_epsilon": "norm_epsilon"},
    ),
    "stablelm": Architecture("stablelm", partial_rotary="partial_rotary_factor"),
    "nemotron": Architecture(
        "nemotron",
        SEPARATE | PRE_NORM | {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        settings={"attention.layer_norm_epsilon": "norm_eps", "attention.layer_norm_rms_epsilon": "norm_eps"},
        partial_rotary="partial_rotary_factor",
        has_shifted_norms=True,
    ),
    "phi2": Architecture(
        "phi",
        SEPARATE
        | {
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
            "attn_norm": "input_layernorm",
        },
        top=TOP | {"output_norm": "model.final_layernorm"},
        partial_rotary="partial_rotary_factor",
    ),
    "phi3": Architecture(
        "phi3",
        PRE_NORM
        | {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"}
        | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        partial_rotary="partial_rotary_factor",
    ),
    "glm4": Architecture(
        "glm4",
        SEPARATE
        | PRE_NORM
        | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
        | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        partial_rotary="partial_rotary_factor",
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        SEPARATE
        | {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
        | {"attn_sinks": "self_attn.sinks"},
        settings={"expert_count": "num_local_experts"},
    ),
    "deepseek2": Architecture(
        "deepseek_v2",
        LATENT | GATED | PRE_NORM,
        settings={
            "attention.q_lora_rank": "q_lora_rank",
            "attention.kv_lora_rank": "kv_lora_rank",
            "attention.head_count_kv": None,
            "attention.key_length": None,
            "rope.dimension_count": "qk_rope_head_dim",
            "expert_count": "n_routed_experts",
            "leading_dense_block_count": "first_k_dense_replace",
        },
        defaults={"q_lora_rank": None},
    ),
    "gpt2": Architecture(
        "gpt2",
        GPT_BLOCK,
        layer="transformer.h.{}.",
        top=GPT_TOP,
        settings=GPT_SETTINGS,
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    "starcoder": Architecture(
        "gpt_bigcode",
        GPT_BLOCK,
        layer="transformer.h.{}.",
        top=GPT_TOP,
        settings=GPT_SETTINGS,
        defaults={"multi_query": True},
    ),
    "bloom": Architecture(
        "bloom",
        QUERY_KEY_VALUE | PRE_NORM,
        layer="transformer.h.{}.",
        top=EMBEDDING_TOP,
        settings=GPT_SETTINGS | {"embedding_length": "hidden_size", "feed_forward_length": None},
        is_regrouped=True,
    ),
    "gptneox": Architecture(
        "gpt_neox",
        QUERY_KEY_VALUE | PRE_NORM | {"attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"},
        layer="gpt_neox.layers.{}.",
        top={"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
        settings={"use_parallel_residual": "use_parallel_residual", "attention.head_count_kv": None},
        partial_rotary="rotary_pct",
        is_regrouped=True,
    ),
    "falcon": Architecture(
        "falcon",
        QUERY_KEY_VALUE | {"attn_norm": "input_layernorm"},
        layer="transformer.h.{}.",
        top=EMBEDDING_TOP,
        settings={
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
            "attention.head_count_kv": "num_kv_heads",
            "attention.key_length": None,
        },
        defaults={"alibi": False},
        is_regrouped=True,
    ),
    "mpt": Architecture(
        "mpt",
        {
            "attn_norm": "norm_1",
            "ffn_norm": "norm_2",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
        layer="transformer.blocks.{}.",
        top={"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"},
        settings={
            "context_length": "max_seq_len",
            "block_count": "n_layers",
            "embedding_length": "d_model",
            "attention.head_count": "n_heads",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
    ),
    "bert": Architecture(
        "bert",
        {
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
        layer="encoder.layer.{}.",
        top=BERT_TOP,
    ),
    "nomic-bert": Architecture(
        "nomic_bert",
        {
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "attn_output_norm": "norm1",
            "ffn_up": "mlp.fc11",
            "ffn_gate": "mlp.fc12",
            "ffn_down": "mlp.fc2",
            "layer_output_norm": "norm2",
        },
        layer="encoder.layers.{}.",
        top=BERT_TOP | {"token_embd_norm": "emb_ln"},
    ),
}
