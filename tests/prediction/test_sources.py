"""What is run and on what: sources, tokenizers, special tokens. Each of these was once silently wrong, or refused."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from locater import Stored
from locater.cli.program import app
from locater.errors import Refusal
from locater.prediction.language_model import begins_with_bos, load_model, load_tokenizer
from locater.prediction.predict import Effort, Text, Tokens, predict
from locater.prediction.random_ids import Alphabet, random_windows
from locater.prediction.windows import special_tokens, split_windows
from locater_lab.data.vocabulary import Words
from locater_lab.train.loader import export
from locater_lab.train.model import LanguageModel
from locater_lab.train.shape import Shape
from predict_cases import GROUPED, LENGTH, VOCABULARY, WORDS, model, save_with_tokenizer, tokens

QUICK = Effort(window=LENGTH, calibration=3, test=1, texts=1)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    place = tmp_path_factory.mktemp("text") / "text.txt"
    order = torch.randint(len(WORDS), (4000,), generator=torch.Generator().manual_seed(3))
    place.write_text(" ".join(WORDS[number] for number in order.tolist()))
    return place


def test_a_tokenizer_that_transformers_makes_up_is_refused(text, tmp_path):
    """A folder without one: transformers gives five special tokens, and all text is unknown."""
    model("albert").save_pretrained(tmp_path)
    with pytest.raises(Refusal, match=r"a tokenizer of about 60 tokens, as many as the model has, got one of \d"):
        predict(tmp_path, text=text, effort=QUICK)


def test_a_text_of_another_alphabet_is_refused(tmp_path):
    save_with_tokenizer(tmp_path)
    foreign = tmp_path / "text.txt"
    foreign.write_text("ሰላም ለዓለም " * 2000, encoding="utf-8")
    with pytest.raises(Refusal, match=r"at most 10% unknown tokens, got \d+%; give a text of its alphabet"):
        predict(tmp_path, text=foreign, effort=QUICK)


def test_ids_beyond_the_vocabulary_are_refused():
    with pytest.raises(Refusal, match=f"token ids below {VOCABULARY}, the model's vocabulary, got 60"):
        predict(model("llama"), text=Tokens(tokens(4).where(tokens(4) > 0, VOCABULARY)), effort=QUICK)


class Tokenizer:
    """As those that are read from GGUF files: BOS is a setting that the call itself does not follow."""

    bos_token_id, add_bos_token, unk_token_id = 1, True, None

    def __len__(self):
        return VOCABULARY

    def __call__(self, text, **options):
        return {"input_ids": [2 + ord(character) % 50 for character in text]}


def test_windows_begin_with_bos_where_the_tokenizer_says_so(text):
    assert special_tokens(Tokenizer()) == ([1], [])
    seen = []
    net = model("llama")
    net.get_input_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    predict(net, text=Text(text, tokenizer=Tokenizer()), effort=QUICK)
    assert all(bool((ids[:, 0] == 1).all()) for ids in seen) and len(seen) >= 2


@pytest.mark.parametrize("begins", [True, False])
def test_a_gguf_file_says_whether_texts_begin_with_bos(tmp_path, begins):
    import gguf

    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_add_bos_token(begins)
    writer.add_tensor("token_embd.weight", torch.zeros(4, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert begins_with_bos(path) is begins


def test_special_positions_of_given_tokens_are_apart():
    assert split_windows(tokens(4), num_test=1, special=[0, 40, -1]).alone == (0, 40, LENGTH - 1)
    with pytest.raises(Refusal, match="special positions within windows of 96 tokens"):
        split_windows(tokens(4), num_test=1, special=[LENGTH])
    effort = Effort(window=LENGTH, calibration=6, test=2, texts=2)
    given_windows = (Tokens(tokens(8), special) for special in ([40, -1], []))
    with_them, without = (predict(model("bert"), text=windows, effort=effort) for windows in given_windows)
    assert [head.measured for head in with_them.heads] == [head.measured for head in without.heads]
    assert [head.predicted for head in with_them.heads] != [head.predicted for head in without.heads]


def test_loss_is_the_model_s_own():
    torch.manual_seed(1)
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)).eval()
    ids = tokens(8)
    found = predict(net, text=Tokens(ids), effort=Effort(window=LENGTH, calibration=6, test=2, texts=1))
    with torch.no_grad():
        expected = float(net(ids[[3, 7]], labels=ids[[3, 7]]).loss)
    assert found.loss == pytest.approx(expected, rel=1e-5)
    assert found.to_json()["loss"] == found.loss and f"loss on the measured windows: {expected:.2f}" in found.summary()
    assert predict(model("bert"), text=Tokens(ids), effort=QUICK).loss is None


def trained(folder, **changed):
    torch.manual_seed(0)
    shape = dict(vocab_size=len(WORDS) + 2, context=128, num_layers=2, num_heads=2, d_model=32) | changed
    net = LanguageModel(Shape(**shape)).eval()
    export(net, folder, Words(("<unk>", "<eos>", *WORDS)))
    return net


@pytest.mark.parametrize("positions", ["rotary", "learned", "sinusoidal"])
def test_models_of_our_own_training(text, tmp_path, positions):
    net = trained(tmp_path, positions=positions)
    found = predict(tmp_path, text=text, effort=QUICK)
    assert len(found.heads) == 4 and 2 < found.loss < 6
    assert type(load_model(tmp_path)) is type(net) and len(load_tokenizer(tmp_path)) == len(WORDS) + 2
    live = predict(net, text=Text(text, tokenizer=load_tokenizer(tmp_path)), effort=QUICK)
    assert [head.measured for head in live.heads] == [head.measured for head in found.heads]


def test_a_model_of_our_own_that_is_not_whole_is_refused(tmp_path):
    """An untied output layer that is lost would be a random one."""
    trained(tmp_path, tied=False)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["output.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(Refusal, match=r"got all but output\.weight; the checkpoint is not whole"):
        load_model(tmp_path)


def test_random_windows_follow_zipf_between_special_tokens():
    alphabet = Alphabet([5], [6, 7], leave_out=[0, 5, 6, 7])
    ids = random_windows(1000, alphabet, count=50, length=200)
    assert (ids[:, 0] == 5).all() and (ids[:, -2:] == torch.tensor([6, 7])).all()
    inside = ids[:, 1:-2].flatten()
    assert not any((inside == number).any() for number in (0, 5, 6, 7))
    counts = torch.bincount(inside, minlength=1000)
    # Ranks 0 and 27: 1/2.7 against 1/29.7.
    assert counts[1] / counts[26:36].float().mean() == pytest.approx(34.2 / 2.7, rel=0.3)
    assert torch.equal(ids, random_windows(1000, alphabet, count=50, length=200))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_random_ids_are_measured_as_the_model_s_attention(name):
    """Its numbers are those of `output_attentions` on the ids that the model was given."""
    net, seen = model(name), []
    net.get_input_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    found = predict(net, text="random", effort=Effort(window=LENGTH, calibration=4, test=4, texts=2))
    ids = torch.cat(seen[-1:])
    assert ids.shape == (4, LENGTH) and found.text == "random ids"
    counts = torch.bincount(ids.flatten(), minlength=VOCABULARY).float()
    assert counts.max() > 4 * counts.median()  # Zipf, whatever the ranks
    with torch.no_grad():
        attention = net(ids, output_attentions=True).attentions
    for one in found.heads:
        sink = attention[one.layer][:, one.head, 64:, 0].mean()
        assert one.measured.sink_mass == pytest.approx(float(sink), abs=1e-5)


def test_random_ids_begin_as_the_gguf_file_says(tmp_path, monkeypatch):
    from locater.prediction import random_ids as module

    settings = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 2}
    header = type("Header", (), {"settings": settings})
    monkeypatch.setattr(module, "read_header", lambda source: header)
    monkeypatch.setattr(module, "read_vocabulary", lambda source: ["<pad>", "a", "<bos>", "Ġthe", "of"])
    path = tmp_path / "model.gguf"
    path.write_bytes(b"")
    found = module._alphabet(path)
    assert (found.before, found.after, found.leave_out, found.evenly) == ([2], [], [0, 1, 2], False)


def test_random_ids_are_words_where_the_tokenizer_tells_them():
    ids = random_windows(6, Alphabet(leave_out=[0, 1]), count=2, length=300)
    counts = torch.bincount(ids.flatten(), minlength=6)
    assert counts[:2].sum() == 0 and counts[2] > counts[5] > 0
    even = torch.bincount(random_windows(4, Alphabet(evenly=True), count=4, length=1000).flatten(), minlength=4)
    assert (even - 1000).abs().max() < 120


def test_command_without_text(tmp_path):
    """A folder without a tokenizer, of which nothing but random ids can be asked."""
    model("llama").save_pretrained(tmp_path)
    arguments = [
        "predict",
        str(tmp_path),
        "--text",
        "random",
        "--window",
        str(LENGTH),
        "--calibration",
        "4",
        "--test",
        "2",
        "--json",
    ]
    result = CliRunner().invoke(app, [*arguments, str(tmp_path / "out.json"), "--heads"])
    assert result.exit_code == 0, result.output
    assert "8 heads" in result.output and "decoder 1.3" in result.output
    assert "random ids" in result.output and "2 windows" in result.output
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["text"] == "random ids" and len(document["heads"]) == 8
    assert set(document["heads"][0]["measured"]) >= {"near_mass_beyond_first", "sink_mass"}
    refused = CliRunner().invoke(app, ["predict", str(tmp_path), "--text", "random", "--by-line"])
    assert refused.exit_code == 2 or "--text random goes without" in str(refused.exception)


@pytest.mark.parametrize("options", [dict(adapter="x"), dict(layout="x"), dict(allow_pickle=True)])
def test_options_that_running_would_pass_over_are_refused(tmp_path, options):
    with pytest.raises(Refusal, match=f"a model without {next(iter(options))}=…, for running it"):
        predict(Stored(tmp_path, **options))


def without_type(folder, name, *, prefix):
    """A model's folder whose config names no model type, its tensors under this prefix."""
    save_with_tokenizer(folder, name=name)
    place = folder / "model.safetensors"
    tensors = {prefix + key: tensor.clone() for key, tensor in load_file(place).items()}
    save_file(tensors, place, metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    del settings["model_type"]
    (folder / "config.json").write_text(json.dumps(settings))
    return folder, tensors


def test_a_config_without_a_model_type(tmp_path):
    """Where the tensors name the type the model is run as it, and says so; else its owner must say."""
    folder, tensors = without_type(tmp_path / "said", "bert", prefix="bert.")
    found = predict(folder, text=Tokens(tokens(4)), effort=QUICK)
    live = predict(model("bert"), text=Tokens(tokens(4)), effort=QUICK)
    entropies = ([head.measured.normalised_entropy for head in one.heads] for one in (found, live))
    assert next(entropies) == pytest.approx(next(entropies), abs=1e-5)
    assert found.left_out == ("run as bert by its tensor names: the config has no model type",)
    del tensors["bert.encoder.layer.1.output.dense.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Refusal, match="missing a tensor `encoder.layer.1.output.dense.weight` of bert"):
        predict(folder, text=Tokens(tokens(4)), effort=QUICK)
    folder, _ = without_type(tmp_path / "bare", "bert", prefix="")
    with pytest.raises(Refusal, match='a model type in config.json, for running a model; add "model_type": "'):
        predict(folder, text=Tokens(tokens(4)), effort=QUICK)
