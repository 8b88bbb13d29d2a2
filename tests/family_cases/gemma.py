from .base import Case
from .llama import FOUR, FULL, GQA, SLIDING, case

WIDE = FOUR | dict(head_dim=16, sliding_window=5)
BOTH_KINDS = WIDE | dict(layer_types=[SLIDING, FULL, FULL, SLIDING], query_pre_attn_scalar=9)
BASES = {
    SLIDING: dict(rope_type="default", rope_theta=20.0),
    FULL: dict(rope_type="linear", rope_theta=300.0, factor=4.0),
}
OLDER = dict(
    rope_theta=300.0,
    rope_local_base_freq=20.0,
    rope_scaling=dict(rope_type="linear", factor=4.0),
    sliding_window_pattern=2,
)
TOWER = dict(
    vision_config=dict(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    ),
    image_token_index=98,
    boi_token_index=97,
    eoi_token_index=96,
    mm_tokens_per_image=4,
)


def module(name: str) -> str:
    return name.replace("language_model.model.", "model.language_model.")


CASES = [
    case("gemma", "Gemma", settings=GQA | dict(head_dim=16, attention_bias=True)),
    case("gemma-base", "Gemma", settings=GQA | dict(head_dim=16, rope_theta=300.0), model="Model", as_given=True),
    case("gemma2", "Gemma2", settings=WIDE | dict(query_pre_attn_scalar=9, attn_logit_softcapping=1.5)),
    case("gemma2-uncapped", "Gemma2", settings=BOTH_KINDS | dict(attn_logit_softcapping=None)),
    case("gemma2-older-config", "Gemma2", settings=WIDE | dict(rope_theta=300.0), as_given=True),
    case("gemma3-text", "Gemma3Text", model="Model", settings=BOTH_KINDS | dict(rope_parameters=BASES)),
    Case(
        "gemma3-text-head",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        BOTH_KINDS | dict(attention_bias=True),
    ),
    case("gemma3-text-older-config", "Gemma3Text", model="Model", settings=WIDE | OLDER, as_given=True),
    case(
        "gemma3-text-both-ways",
        "Gemma3Text",
        model="Model",
        settings=BOTH_KINDS | dict(use_bidirectional_attention=True, sliding_window=6),
    ),
    case(
        "gemma3",
        "Gemma3",
        model="ForConditionalGeneration",
        settings=TOWER | dict(text_config=WIDE | OLDER),
        coverage="PARTIAL: text only, not the vision tower",
        module=module,
        as_given=True,
    ),
]
