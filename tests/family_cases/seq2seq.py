from functools import partial

import torch

from .base import TOKENS, Case


def both_sides(config):
    return {"input_ids": torch.randint(3, 90, (2, TOKENS)), "decoder_input_ids": torch.randint(3, 90, (2, TOKENS - 3))}


def decoder_alone(config):
    """The encoder that the decoder looks at is of another kind, and not stored."""
    return {"input_ids": torch.randint(3, 90, (2, TOKENS)), "encoder_hidden_states": torch.randn(2, 7, 48)}


def spectrogram(config):
    frames = 2 * config.max_source_positions
    return {
        "input_features": torch.randn(2, config.num_mel_bins, frames),
        "decoder_input_ids": torch.randint(3, 90, (2, TOKENS)),
    }


def waveform(config):
    return {"input_values": torch.randn(2, 200)}


T5 = dict(vocab_size=99, d_model=48, d_kv=10, d_ff=64, num_layers=2, num_decoder_layers=3, num_heads=4)
T5 |= dict(relative_attention_num_buckets=8, relative_attention_max_distance=10)
BART = dict(vocab_size=99, d_model=48, encoder_layers=3, decoder_layers=2, max_position_embeddings=64)
BART |= dict(encoder_attention_heads=4, decoder_attention_heads=3, encoder_ffn_dim=64, decoder_ffn_dim=64)
BART |= dict(pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2)
WHISPER = BART | dict(num_mel_bins=8, max_source_positions=10, max_target_positions=32)
SPEECH = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64)
SPEECH |= dict(conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2)
SPEECH |= dict(num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2)

t5 = partial(Case, inputs=both_sides)
bart = partial(Case, settings=BART, inputs=both_sides)
speech = partial(Case, inputs=waveform)

CASES = [
    t5("t5", "T5Config", "T5ForConditionalGeneration", T5),
    t5("t5-v1.1", "T5Config", "T5Model", T5 | dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
    Case("t5-encoder", "T5Config", "T5EncoderModel", T5),
    t5("mt5", "MT5Config", "MT5ForConditionalGeneration", T5),
    t5("umt5", "UMT5Config", "UMT5ForConditionalGeneration", T5),
    bart("bart", "BartConfig", "BartForConditionalGeneration"),
    bart("bart-base-class", "BartConfig", "BartModel"),
    bart("bart-decoder", "BartConfig", "BartForCausalLM", inputs=decoder_alone, settings=BART | dict(is_decoder=True)),
    bart("plbart", "PLBartConfig", "PLBartModel"),
    bart("mbart", "MBartConfig", "MBartForConditionalGeneration"),
    bart("pegasus", "PegasusConfig", "PegasusModel"),
    bart("m2m-100", "M2M100Config", "M2M100Model"),
    bart("blenderbot", "BlenderbotConfig", "BlenderbotModel"),
    bart("marian", "MarianConfig", "MarianMTModel", settings=BART | dict(scale_embedding=True)),
    Case("whisper", "WhisperConfig", "WhisperForConditionalGeneration", WHISPER, inputs=spectrogram),
    Case("whisper-base-class", "WhisperConfig", "WhisperModel", WHISPER, inputs=spectrogram),
    speech("wav2vec2", "Wav2Vec2Config", "Wav2Vec2Model", SPEECH),
    speech("wav2vec2-ctc-stable", "Wav2Vec2Config", "Wav2Vec2ForCTC", SPEECH | dict(do_stable_layer_norm=True)),
    speech("hubert", "HubertConfig", "HubertForCTC", SPEECH),
    speech("hubert-stable", "HubertConfig", "HubertModel", SPEECH | dict(do_stable_layer_norm=True)),
]
