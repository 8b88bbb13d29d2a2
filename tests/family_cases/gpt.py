from .base import Case

CASES = [
    Case(
        "gpt2",
        "GPT2Config",
        "GPT2LMHeadModel",
        dict(vocab_size=99, n_embd=48, n_layer=2, n_head=4, n_positions=64, scale_attn_by_inverse_layer_idx=True),
    ),
]
