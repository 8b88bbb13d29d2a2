"""`generate` under the monitor: every attention that runs is reported, or a note says which was not."""

import pytest
import torch

from locater.monitor import AttentionMonitor, Scope

transformers = pytest.importorskip("transformers")
SMALL = dict(vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
             decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16)  # fmt: skip
IDS = dict(pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=0)


def bart():
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**SMALL, **IDS))


def t5():
    config = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=2,
                                   num_heads=2, **IDS)  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def whisper():
    lengths = dict(max_source_positions=20, max_target_positions=64, num_mel_bins=8)
    none = dict(suppress_tokens=None, begin_suppress_tokens=None)
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**SMALL, **IDS, **lengths, **none))


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, **IDS))


TEXT = dict(input_ids=torch.randint(3, 50, (2, 9)), attention_mask=torch.ones(2, 9, dtype=torch.long))
SOUND = dict(input_features=torch.randn(2, 8, 40))


@pytest.mark.parametrize(
    ("make", "given", "blocks"),
    [
        (bart, TEXT, {("encoder", 0), ("decoder", 0), ("decoder", 1), ("cross", 0), ("cross", 1)}),
        (t5, TEXT, {("encoder", 0), ("encoder", 1), ("decoder", 0), ("decoder", 1), ("cross", 0), ("cross", 1)}),
        (whisper, SOUND, {("encoder", 0), ("decoder", 0), ("decoder", 1), ("cross", 0), ("cross", 1)}),
        (gpt2, TEXT, {("decoder", 0), ("decoder", 1)}),
    ],
    ids=["bart", "t5", "whisper", "gpt2"],
)
def test_every_attention_of_generate_is_reported(make, given, blocks):
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        alone = model.generate(**given, max_new_tokens=3, do_sample=False)
        with AttentionMonitor(model, every=1, scope=Scope(weights=False)) as monitor:
            watched = model.generate(**given, max_new_tokens=3, do_sample=False)
            report = monitor.report()
    assert torch.equal(alone, watched)
    assert {(layer.block, layer.layer) for layer in report.evaluation} == blocks
    assert not any("outside" in note for note in report.notes)


def test_what_runs_by_itself_is_named():
    model = bart().eval()
    with torch.no_grad(), AttentionMonitor(model, every=1, scope=Scope(weights=False)) as monitor:
        model(**TEXT)
        model.model.decoder(TEXT["input_ids"])
        notes = monitor.report().notes
        assert any(
            "`model.decoder.layers.0.self_attn` and 1 more ran outside of a call of the model" in n for n in notes
        )
        model(**TEXT)
        assert not any("outside" in note for note in monitor.report().notes)
