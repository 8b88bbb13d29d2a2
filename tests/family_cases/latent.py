from .llama import GQA, YARN, case

LATENT = {key: value for key, value in GQA.items() if key != "num_key_value_heads"} | dict(
    kv_lora_rank=20,
    q_lora_rank=24,
    qk_nope_head_dim=8,
    qk_rope_head_dim=6,
    v_head_dim=10,
    moe_intermediate_size=32,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
)
STRETCHED = YARN | dict(mscale=1.5, mscale_all_dim=0.7)
OLDER = {("type" if key == "rope_type" else key): value for key, value in STRETCHED.items() if key != "rope_theta"}

CASES = [
    case("deepseek-v2", "DeepseekV2", settings=LATENT | dict(rope_parameters=STRETCHED, attention_bias=True)),
    case("deepseek-v2-lite", "DeepseekV2", settings=LATENT | dict(q_lora_rank=None), model="Model", as_given=True),
    case(
        "deepseek-v3",
        "DeepseekV3",
        settings=LATENT | dict(num_key_value_heads=4, rope_theta=100.0, rope_scaling=OLDER),
        as_given=True,
    ),
    case(
        "deepseek-v3-direct",
        "DeepseekV3",
        settings=LATENT
        | dict(num_key_value_heads=4, q_lora_rank=None, rope_interleave=False, attention_bias=True)
        | dict(rope_parameters=STRETCHED),
    ),
]
