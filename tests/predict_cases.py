"""Tiny models, texts and tokenizers for the tests of prediction."""

import torch
import transformers

LENGTH = 96
VOCABULARY = 60
COMMON = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
SIZES = COMMON | dict(intermediate_size=48, max_position_embeddings=128)
GROUPED = SIZES | dict(num_key_value_heads=2)

MODELS = {
    "gpt2": lambda: transformers.GPT2Model(
        transformers.GPT2Config(
            bos_token_id=0, eos_token_id=0, vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128
        )
    ),
    "llama": lambda: transformers.LlamaModel(transformers.LlamaConfig(**GROUPED)),
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES)),
    "albert": lambda: transformers.AlbertModel(transformers.AlbertConfig(**SIZES, embedding_size=32)),
    "qwen3": lambda: transformers.Qwen3Model(transformers.Qwen3Config(**GROUPED, head_dim=8)),
    "mistral": lambda: transformers.MistralModel(transformers.MistralConfig(**GROUPED, sliding_window=24)),
    "gemma2": lambda: transformers.Gemma2Model(transformers.Gemma2Config(**GROUPED, head_dim=8, sliding_window=24)),
    "t5": lambda: transformers.T5Model(
        transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    ),
}


def model(name: str, *, sharpness: float = 10.0):
    """Random weights, queries and keys larger than at initialisation and all tokens with a part in common.

    So heads differ in how sharply they look and, with rotary or learned positions, in where.
    """
    torch.manual_seed(1)
    made = MODELS[name]().eval()
    made.get_input_embeddings().weight.data += 0.02 * torch.randn(32)
    for part, parameter in made.named_parameters():
        if parameter.dim() == 2 and any(word in part for word in ("c_attn", "q_proj", "k_proj", "query", "key")):
            parameter.data *= sharpness
        if "wpe" in part or "position_embeddings" in part:  # neighbours alike, as training makes them
            parameter.data = 4 * parameter.data.cumsum(0) / (1 + torch.arange(len(parameter))).sqrt()[:, None]
    made.set_attn_implementation("eager")
    return made


def tokens(num_windows: int, *, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(VOCABULARY, (num_windows, length), generator=generator)


def save_with_tokenizer(folder, *, name: str = "llama") -> None:
    """A model's directory as Hugging Face writes it, its tokenizer a list of characters."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    characters = {"[UNK]": 0} | {character: number for number, character in enumerate(CHARACTERS, 1)}
    tokenizer = Tokenizer(models.WordLevel(characters, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    model(name).save_pretrained(folder)


CHARACTERS = "abcdefghijklmnopqrstuvwxyz \n.,()'_0123456789:=-`*"
WORDS = (
    *("the", "a", "of", "to", "in", "and", "is", "that", "for", "as", "with", "it", "be", "this", "are", "not"),
    *("on", "by", "or", "from", "if", "an", "at", "value", "object", "name"),
)
