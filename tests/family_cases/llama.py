from functools import partial

from .base import Case

GQA = dict(
    vocab_size=99,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
FOUR = GQA | dict(num_hidden_layers=4)
EXPERTS = dict(moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
SLIDING, FULL = "sliding_attention", "full_attention"
SHORT, LONG = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], [1.5, 2.0, 3.0, 5.0, 8.0, 13.0]
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=16)


def case(name: str, family: str, *, model: str = "ForCausalLM", settings: dict | None = None, **more) -> Case:
    """A case whose classes are `<family>Config` and `<family>ForCausalLM`."""
    return Case(name, f"{family}Config", f"{family}{model}", GQA if settings is None else settings, **more)


def rope(**parameters) -> dict:
    return GQA | dict(rope_parameters=parameters)


llama = partial(case, family="Llama")

LLAMA = [
    llama("llama", settings=GQA | dict(attention_bias=True)),
    llama("llama-base", settings=GQA, model="Model"),
    llama("llama-both-ways", settings=GQA | dict(is_causal=False)),
    llama("llama-head-dim", settings=GQA | dict(head_dim=16)),
    llama("llama-linear", settings=rope(rope_type="linear", rope_theta=300.0, factor=4.0)),
    llama("llama-dynamic", settings=rope(rope_type="dynamic", rope_theta=300.0, factor=4.0)),
    llama(
        "llama-dynamic-beyond",
        settings=rope(rope_type="dynamic", rope_theta=300.0, factor=4.0) | dict(max_position_embeddings=8),
    ),
    llama("llama-yarn", settings=rope(**YARN, beta_fast=8.0, beta_slow=0.5)),
    llama("llama-yarn-untruncated", settings=rope(**YARN, truncate=False, attention_factor=1.3)),
    llama("llama-yarn-mscale", settings=rope(**YARN, mscale=1.5, mscale_all_dim=0.7)),
    llama(
        "llama-3",
        settings=rope(
            rope_type="llama3",
            rope_theta=500.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    *(
        llama(
            f"llama-longrope-{original}",
            settings=rope(
                rope_type="longrope",
                rope_theta=300.0,
                short_factor=SHORT,
                long_factor=LONG,
                factor=8.0,
                original_max_position_embeddings=original,
            ),
        )
        for original in (8, 16)
    ),
    llama(
        "llama-older-config",
        settings={key: value for key, value in GQA.items() if key != "num_key_value_heads"}
        | dict(rope_theta=500.0, rope_scaling=dict(type="linear", factor=2.0), rms_norm_eps=1e-5),
        as_given=True,
    ),
]

MISTRAL_AND_QWEN = [
    case("mistral", "Mistral", settings=GQA | dict(sliding_window=5)),
    case(
        "mistral-unbounded",
        "Mistral",
        settings=GQA | dict(sliding_window=None, head_dim=16),
        model="Model",
        as_given=True,
    ),
    case("mixtral", "Mixtral", settings=GQA | dict(sliding_window=5, num_local_experts=4)),
    case("mixtral-unbounded", "Mixtral", settings=GQA | dict(num_local_experts=4), as_given=True),
    case("qwen2", "Qwen2", settings=FOUR | dict(sliding_window=5)),
    case(
        "qwen2-max-window-layers",
        "Qwen2",
        settings=FOUR | dict(sliding_window=5, use_sliding_window=True, max_window_layers=2),
        as_given=True,
    ),
    case(
        "qwen2-layer-types",
        "Qwen2",
        settings=FOUR | dict(sliding_window=5, use_sliding_window=True, layer_types=[SLIDING, FULL, FULL, SLIDING]),
    ),
    case("qwen3", "Qwen3", settings=FOUR | dict(head_dim=16, attention_bias=True)),
    case(
        "qwen3-window",
        "Qwen3",
        settings=FOUR | dict(head_dim=16, sliding_window=5, use_sliding_window=True, max_window_layers=1),
        as_given=True,
    ),
    case("qwen2-moe", "Qwen2Moe", settings=FOUR | EXPERTS),
    case(
        "qwen2-moe-window",
        "Qwen2Moe",
        settings=FOUR | EXPERTS | dict(sliding_window=5, use_sliding_window=True, max_window_layers=2, qkv_bias=False),
        as_given=True,
    ),
    case("qwen3-moe", "Qwen3Moe", settings=GQA | EXPERTS | dict(head_dim=16), as_given=True),
    case(
        "qwen3-moe-window",
        "Qwen3Moe",
        settings=GQA | EXPERTS | dict(sliding_window=5, use_sliding_window=True, attention_bias=True),
    ),
]

OTHERS = [
    case("olmo", "Olmo", settings=GQA | dict(attention_bias=True)),
    case("nemotron", "Nemotron", settings=GQA | dict(head_dim=16, partial_rotary_factor=0.5)),
    case(
        "dots1",
        "Dots1",
        settings=FOUR
        | EXPERTS
        | dict(
            n_routed_experts=4,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            head_dim=12,
            routed_scaling_factor=1.0,
            sliding_window=5,
            layer_types=[FULL, SLIDING, FULL, SLIDING],
        ),
    ),
    case("olmo2", "Olmo2", settings=GQA | dict(attention_bias=True)),
    case("olmo2-base", "Olmo2", settings=GQA | dict(rope_theta=500.0), model="Model", as_given=True),
    case("smollm3", "SmolLM3", settings=FOUR | dict(no_rope_layers=[1, 0, 1, 0], attention_bias=True)),
    case(
        "smollm3-interval",
        "SmolLM3",
        settings=FOUR | dict(no_rope_layer_interval=3, use_sliding_window=True, sliding_window=5, rope_theta=500.0),
        as_given=True,
    ),
    case("stablelm", "StableLm", settings=GQA | dict(num_attention_heads=2, num_key_value_heads=1), as_given=True),
    case(
        "stablelm-2",
        "StableLm",
        settings=GQA
        | dict(use_qkv_bias=True, qk_layernorm=True, use_parallel_residual=True)
        | dict(partial_rotary_factor=0.5, rope_theta=300.0),
        as_given=True,
    ),
    case("phi", "Phi", settings=GQA | dict(partial_rotary_factor=0.5)),
    case("phi-qk-norm", "Phi", settings=GQA | dict(qk_layernorm=True, rope_theta=300.0), as_given=True),
    case("phi3", "Phi3", settings=GQA | dict(sliding_window=5), as_given=True),
    *(
        case(
            f"phi3-{kind}-{original}",
            "Phi3",
            settings=GQA
            | dict(original_max_position_embeddings=original, rope_theta=300.0, sliding_window=None)
            | dict(rope_scaling=dict(type=kind, short_factor=SHORT, long_factor=LONG)),
            as_given=True,
        )
        for kind, original in (("longrope", 8), ("longrope", 16))
    ),
    case("phi3-partial", "Phi3", settings=GQA | dict(head_dim=16, partial_rotary_factor=0.5), model="Model"),
    case("cohere", "Cohere", settings=GQA | dict(use_qk_norm=True, attention_bias=True)),
    case("cohere-plain", "Cohere", settings=GQA | dict(rope_theta=300.0), as_given=True),
    case("cohere2", "Cohere2", settings=FOUR | dict(sliding_window=5, layer_types=[SLIDING, FULL, SLIDING, FULL])),
    case("cohere2-pattern", "Cohere2", settings=FOUR | dict(sliding_window=5, sliding_window_pattern=3), as_given=True),
    case("granite", "Granite", settings=GQA | dict(attention_multiplier=0.5, attention_bias=True)),
    case(
        "granite-moe", "GraniteMoe", settings=GQA | dict(attention_multiplier=0.5, num_local_experts=4), as_given=True
    ),
    case("starcoder2", "Starcoder2", settings=GQA | dict(sliding_window=5)),
    case("starcoder2-plain", "Starcoder2", settings=GQA | dict(use_bias=False), as_given=True),
]

CASES = [*LLAMA, *MISTRAL_AND_QWEN, *OTHERS]
