"""The architectures of llama.cpp that are read: a row each, with the changes that its converter makes."""

from .names import (
    BERT_TOP,
    EMBEDDING_TOP,
    GATED,
    GPT_BLOCK,
    GPT_SETTINGS,
    GPT_TOP,
    HEAD_NORMS,
    HUNYUAN_NORMS,
    LATENT,
    LATENT_SETTINGS,
    LLAMA,
    MULTIPLIERS,
    PLAIN_FEEDFORWARD,
    POST_NORM,
    PRE_NORM,
    QUERY_KEY_VALUE,
    SANDWICH,
    SEPARATE,
    TOP,
    Architecture,
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", is_permuted=True),
    "mistral": Architecture("mistral", is_permuted=True, defaults={"sliding_window": None}),
    "granite": Architecture("granite", is_permuted=True, settings=MULTIPLIERS),
    "granitemoe": Architecture("granitemoe", is_permuted=True, settings=MULTIPLIERS),
    "arcee": Architecture("arcee", SEPARATE | PRE_NORM | PLAIN_FEEDFORWARD, is_permuted=True),
    "apertus": Architecture(
        "apertus",
        SEPARATE
        | HEAD_NORMS
        | PLAIN_FEEDFORWARD
        | {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
    ),
    "seed_oss": Architecture(
        "seed_oss",
        LLAMA | {"post_attention_norm": "post_attention_layernorm"},
        settings={"attention.key_length": "head_dim"},
    ),
    "ernie4_5": Architecture("ernie4_5"),
    "ernie4_5-moe": Architecture("ernie4_5_moe"),
    "dots1": Architecture("dots1", LLAMA | HEAD_NORMS),
    "jais2": Architecture("jais2", SEPARATE | PRE_NORM | PLAIN_FEEDFORWARD),
    "phimoe": Architecture("phimoe", settings={"expert_count": "num_local_experts"}, defaults={"attention_bias": True}),
    "glm4moe": Architecture(
        "glm4_moe",
        LLAMA | HEAD_NORMS | {"post_attention_norm": "post_attention_layernorm"},
        settings={"expert_count": "n_routed_experts"},
        partial_rotary="partial_rotary_factor",
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        LLAMA | HEAD_NORMS,
        settings={"expert_count": "num_local_experts", "rope.dimension_count": "rotary_dim"},
        partial_rotary="partial_rotary_factor",
    ),
    "qwen2vl": Architecture("qwen2_vl_text"),
    "qwen3vl": Architecture("qwen3_vl_text", LLAMA | HEAD_NORMS),
    "qwen3vlmoe": Architecture("qwen3_vl_moe_text", LLAMA | HEAD_NORMS),
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
        SEPARATE | PRE_NORM | PLAIN_FEEDFORWARD,
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
        settings=LATENT_SETTINGS,
        defaults={"q_lora_rank": None},
    ),
    "mistral4": Architecture(
        "mistral4", LATENT | GATED | PRE_NORM, settings=LATENT_SETTINGS, defaults={"q_lora_rank": None}
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", LLAMA | HUNYUAN_NORMS),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", LLAMA | HUNYUAN_NORMS, settings={"expert_used_count": "moe_topk"}),
    "gemma4": Architecture(
        "gemma4_text",
        SEPARATE | GATED | SANDWICH | HEAD_NORMS,
        settings={
            "attention.key_length": None,
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
    ),
    "mimo2": Architecture(
        "mimo_v2_flash",
        LLAMA | {"attn_sinks": "self_attn.attention_sink_bias"},
        settings={
            "attention.value_length": "v_head_dim",
            "expert_count": "n_routed_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
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
        settings={
            "use_parallel_residual": "use_parallel_residual",
            "attention.head_count_kv": None,
            "rope.freq_base": "rotary_emb_base",
        },
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
