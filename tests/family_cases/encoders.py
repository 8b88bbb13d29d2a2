from functools import partial

import torch

from .base import TOKENS, Case, tokens

SIZES = dict(
    vocab_size=99,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=64,
)
DECODER = SIZES | dict(is_decoder=True, add_cross_attention=True)

albert = partial(Case, config="AlbertConfig", model="AlbertForMaskedLM")
electra = partial(Case, config="ElectraConfig", model="ElectraForMaskedLM")
deberta = partial(Case, config="DebertaV2Config", model="DebertaV2ForMaskedLM")
modernbert = partial(Case, config="ModernBertConfig", model="ModernBertForMaskedLM")


def tokens_and_memory(config):
    return tokens(config) | {"encoder_hidden_states": torch.randn(2, TOKENS - 3, config.hidden_size)}


def silence_positions(model):
    """Without relative embeddings and the biases of their projections, DeBERTa's position terms are zero."""
    for name, parameter in model.named_parameters():
        if "rel_embeddings" in name or ("pos_" in name and name.endswith("bias")):
            parameter.zero_()


def keep_tokens_apart(model):
    """Ten layers of random attention make tokens alike, unless each adds little."""
    for name, parameter in model.named_parameters():
        if name.endswith("attention.dense.weight"):
            parameter.mul_(0.2)


CASES = [
    Case("bert", "BertConfig", "BertForMaskedLM", SIZES),
    Case("bert-base", "BertConfig", "BertModel", SIZES),
    Case("bert-decoder", "BertConfig", "BertLMHeadModel", DECODER, inputs=tokens_and_memory),
    Case("roberta", "RobertaConfig", "RobertaForMaskedLM", SIZES),
    Case("roberta-decoder", "RobertaConfig", "RobertaForCausalLM", DECODER, inputs=tokens_and_memory),
    Case("xlm-roberta", "XLMRobertaConfig", "XLMRobertaModel", SIZES),
    Case("camembert", "CamembertConfig", "CamembertForMaskedLM", SIZES),
    electra("electra", settings=SIZES | dict(embedding_size=48)),
    electra("electra-projected", settings=SIZES | dict(embedding_size=24)),
    electra("electra-decoder", model="ElectraForCausalLM", settings=DECODER, inputs=tokens_and_memory),
    albert("albert", settings=SIZES | dict(embedding_size=24)),
    albert(
        "albert-groups",
        model="AlbertModel",
        settings=SIZES | dict(embedding_size=48, num_hidden_layers=5, num_hidden_groups=2, inner_group_num=2),
        prepare=keep_tokens_apart,
    ),
    Case(
        "distilbert",
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        dict(vocab_size=99, dim=48, hidden_dim=64, n_layers=3, n_heads=4, max_position_embeddings=64),
    ),
    deberta("deberta-v2", settings=SIZES | dict(pos_att_type=["c2p", "p2c"], layer_norm_eps=1e-7)),
    deberta(
        "deberta-v2-convolution", settings=SIZES | dict(conv_kernel_size=3, embedding_size=24), model="DebertaV2Model"
    ),
    deberta(
        "deberta-v2-relative",
        settings=SIZES | dict(relative_attention=True, pos_att_type="p2c|c2p", position_buckets=8),
        prepare=silence_positions,
        coverage="PARTIAL: the content-to-position and position-to-content terms left out",
    ),
    Case("mpnet", "MPNetConfig", "MPNetForMaskedLM", SIZES),
    modernbert(
        "modernbert", settings=SIZES | dict(num_hidden_layers=4, local_attention=6, attention_bias=True, pad_token_id=0)
    ),
    modernbert(
        "modernbert-as-published",
        model="ModernBertModel",
        settings=SIZES
        | dict(
            num_hidden_layers=4,
            global_attn_every_n_layers=2,
            local_attention=8,
            global_rope_theta=50.0,
            local_rope_theta=5.0,
            norm_bias=True,
            pad_token_id=0,
        ),
        as_given=True,
    ),
]
