from functools import partial

import torch

from .base import TOKENS, Case, tokens
from .published import FoundryCase, NanoCase

GPT = dict(vocab_size=99, n_embd=48, n_layer=3, n_head=4, n_positions=64)
BIG = dict(vocab_size=99, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
ALIBI = dict(vocab_size=99, hidden_size=48, n_layer=2, n_head=6)
MPT = dict(vocab_size=99, d_model=48, n_layers=2, n_heads=6, max_seq_len=64)

gpt2 = partial(Case, config="GPT2Config", model="GPT2LMHeadModel")
neo = partial(Case, config="GPTNeoConfig", model="GPTNeoForCausalLM")
neox = partial(Case, config="GPTNeoXConfig", model="GPTNeoXForCausalLM")
opt = partial(Case, config="OPTConfig", model="OPTForCausalLM")
mpt = partial(Case, config="MptConfig", model="MptForCausalLM")


def tokens_and_memory(config):
    return tokens(config) | {"encoder_hidden_states": torch.randn(2, TOKENS - 3, config.hidden_size)}


def add_alibi_once(model):
    """transformers' eager path adds Falcon's ALiBi twice (mask and logits), sdpa and the published code once."""

    def without(module, args, kwargs):
        return args, kwargs | {"alibi": None if kwargs["alibi"] is None else torch.zeros_like(kwargs["alibi"])}

    for module in model.modules():
        if type(module).__name__ == "FalconAttention":
            module.register_forward_pre_hook(without, with_kwargs=True)


falcon = partial(Case, config="FalconConfig", model="FalconForCausalLM", prepare=add_alibi_once)

CASES = [
    Case("gpt", "OpenAIGPTConfig", "OpenAIGPTLMHeadModel", GPT),
    gpt2("gpt2", settings=GPT | dict(scale_attn_by_inverse_layer_idx=True)),
    gpt2("gpt2-unscaled", model="GPT2Model", settings=GPT | dict(scale_attn_weights=False)),
    gpt2("gpt2-cross", settings=GPT | dict(add_cross_attention=True), inputs=tokens_and_memory),
    NanoCase("nanogpt", bias=True),
    NanoCase("nanogpt-no-bias", bias=False),
    Case("gpt-bigcode", "GPTBigCodeConfig", "GPTBigCodeForCausalLM", GPT),
    Case(
        "gpt-bigcode-many-keys",
        "GPTBigCodeConfig",
        "GPTBigCodeModel",
        GPT | dict(multi_query=False, scale_attn_weights=False),
    ),
    neo(
        "gpt-neo",
        settings=dict(
            vocab_size=99,
            hidden_size=48,
            num_layers=4,
            num_heads=4,
            max_position_embeddings=64,
            window_size=5,
            attention_types=[[["global", "local"], 1], [["local"], 2]],
        ),
    ),
    Case("gptj", "GPTJConfig", "GPTJForCausalLM", GPT | dict(rotary_dim=6)),
    Case("codegen", "CodeGenConfig", "CodeGenForCausalLM", GPT | dict(n_head=8, rotary_dim=4)),
    neox("gpt-neox", settings=BIG | dict(rotary_pct=0.5, rotary_emb_base=300)),
    neox("gpt-neox-as-published", settings=BIG | dict(rotary_pct=0.5, rotary_emb_base=300), as_given=True),
    neox("gpt-neox-serial", settings=BIG | dict(use_parallel_residual=False, attention_bias=False, rotary_pct=1.0)),
    neox(
        "gpt-neox-base",
        model="GPTNeoXModel",
        settings=BIG | dict(hidden_size=64, rope_scaling=dict(rope_type="linear", factor=3.0)),
        as_given=True,
    ),
    opt("opt", settings=BIG | dict(ffn_dim=64)),
    opt("opt-350m", settings=BIG | dict(ffn_dim=64, do_layer_norm_before=False, word_embed_proj_dim=24)),
    opt(
        "opt-plain-norms", model="OPTModel", settings=BIG | dict(enable_bias=False, layer_norm_elementwise_affine=False)
    ),
    Case("bloom", "BloomConfig", "BloomForCausalLM", ALIBI),
    Case("bloom-base", "BloomConfig", "BloomModel", ALIBI | dict(n_head=4)),
    falcon(
        "falcon-7b", settings=BIG | dict(multi_query=True, rope_parameters=dict(rope_type="default", rope_theta=99.0))
    ),
    falcon(
        "falcon-rw",
        settings=BIG | dict(multi_query=False, alibi=True, bias=True, parallel_attn=False),
    ),
    falcon("falcon-40b", settings=BIG | dict(new_decoder_architecture=True, num_kv_heads=2)),
    falcon(
        "falcon-11b",
        model="FalconModel",
        settings=BIG | dict(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    ),
    mpt("mpt", settings=MPT),
    mpt("mpt-scale", model="MptModel", settings=MPT | dict(attn_config=dict(softmax_scale=0.4))),
    mpt(
        "mpt-clipped",
        settings=MPT | dict(attn_config=dict(clip_qkv=1000.0)),
        coverage="PARTIAL: the clipping of queries and keys (clip_qkv) left out",
    ),
    FoundryCase("mpt-foundry", dict(alibi=True, alibi_bias_max=16, qk_ln=True)),
    FoundryCase("mpt-foundry-one-key", dict(alibi=False, qk_ln=False, attn_type="multiquery_attention")),
    FoundryCase("mpt-foundry-grouped", dict(alibi=True, qk_ln=True, attn_type="grouped_query_attention", kv_n_heads=2)),
]
