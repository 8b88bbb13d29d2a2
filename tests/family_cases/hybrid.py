from .llama import EXPERTS, FOUR, case

MAMBA = dict(mamba_n_heads=4, mamba_d_state=8, mamba_expand=2, mamba_n_groups=1, mamba_d_conv=4, mamba_chunk_size=4)
LINEAR = dict(
    linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, head_dim=16
)

CASES = [
    case(
        "jamba",
        "Jamba",
        settings=FOUR
        | dict(attn_layer_period=4, attn_layer_offset=2, num_experts=2, use_mamba_kernels=False, mamba_d_state=8),
        coverage="PARTIAL: 1 of 4 layers",
    ),
    case(
        "bamba",
        "Bamba",
        settings=FOUR | MAMBA | dict(attn_layer_indices=[1, 3], attention_bias=True),
        coverage="PARTIAL: 2 of 4 layers",
        as_given=True,
    ),
    case(
        "granite-hybrid",
        "GraniteMoeHybrid",
        settings=FOUR
        | MAMBA
        | dict(
            layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
            attention_multiplier=0.5,
            position_embedding_type="rope",
            num_local_experts=2,
            shared_intermediate_size=32,
        ),
        coverage="PARTIAL: 2 of 4 layers",
        as_given=True,
    ),
    case(
        "granite-hybrid-nope",
        "GraniteMoeHybrid",
        model="Model",
        settings=FOUR
        | MAMBA
        | dict(
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            attention_multiplier=0.5,
            position_embedding_type="nope",
            num_local_experts=0,
            shared_intermediate_size=32,
        ),
        coverage="PARTIAL: 1 of 4 layers",
    ),
    case(
        "lfm2",
        "Lfm2",
        settings=FOUR | dict(full_attn_idxs=[2], norm_eps=1e-5),
        coverage="PARTIAL: 1 of 4 layers",
        as_given=True,
    ),
    case(
        "falcon-h1",
        "FalconH1",
        settings=FOUR
        | MAMBA
        | dict(mamba_d_ssm=96, head_dim=16, key_multiplier=0.7, attention_in_multiplier=1.3, attention_bias=True),
    ),
    case("falcon-h1-older-config", "FalconH1", settings=FOUR | MAMBA | dict(mamba_d_ssm=96), as_given=True),
    case(
        "qwen3-next-older-config",
        "Qwen3Next",
        settings=FOUR | EXPERTS | LINEAR | dict(full_attention_interval=2, rope_theta=300.0),
        coverage="PARTIAL: 2 of 4 layers",
        as_given=True,
    ),
    case(
        "qwen3-next",
        "Qwen3Next",
        settings=FOUR | EXPERTS | LINEAR | dict(attention_bias=True, partial_rotary_factor=0.5),
        coverage="PARTIAL: 1 of 4 layers",
    ),
    case(
        "nemotron-h",
        "NemotronH",
        settings={key: value for key, value in FOUR.items() if key != "num_hidden_layers"}
        | dict(
            layers_block_type=["linear_attention", "full_attention", "mlp", "full_attention"],
            head_dim=16,
            mamba_num_heads=4,
            mamba_head_dim=24,
            ssm_state_size=8,
            n_groups=1,
            chunk_size=4,
            use_mamba_kernels=False,
        ),
        coverage="PARTIAL: 2 of 4 layers",
        module=lambda name: name.replace("backbone.", "model."),
    ),
]
