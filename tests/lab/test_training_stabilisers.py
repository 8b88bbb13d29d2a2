"""Every stabiliser and optimiser that `locater train` takes: to the bit after a stop, true in what is kept."""

import dataclasses
import inspect
import json
import re

import pytest
import torch
import yaml

from command import locater
from locater.errors import Refusal
from locater_lab.data.sources import open_data
from locater_lab.train import loop, run
from locater_lab.train.config import GROUPS, PRESETS, Config, StabiliserOptions, make_config
from locater_lab.train.config_file import read_file, read_pairs, to_yaml
from locater_lab.train.loader import load
from locater_lab.train.methods import METHODS, class_of
from locater_lab.train.metrics import read_metrics
from locater_lab.train.model import LanguageModel
from locater_lab.train.processes import Processes
from training_cases import assert_same_run, flags, tiny, write_text

ALONE = Processes(0, 1, torch.device("cpu"))
# What each needs or shows most with; logits of so small a model are far below the usual thresholds.
OPTIONS = {
    "qk-clip": "threshold=0.02",
    "soft-cap": "cap=0.1",
    "z-loss": "weight=0.1",
    "entropy-bonus": "weight=0.1",
    "qk-decay": "decay=5",
    "spectral-initialisation": "xi=0.5,eta=0.3",
}
RIVALS = [name for name in METHODS if name not in ("none", "locater")]
STATEFUL = ("qk-clip", "qk-norm", "sigma-reparam", "qk-decay")
SHORT = dict(steps=6, validate_every=3, save_every=9, num_layers=2, dropout=0.1, accumulate=2)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("LOCATER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path)


def quiet(sentence: str) -> None:
    pass


def chosen(name: str) -> dict[str, str]:
    return {"stabiliser": name, "stabiliser_options": OPTIONS.get(name, "")}


@pytest.mark.parametrize(
    "name", [name if name in STATEFUL else pytest.param(name, marks=pytest.mark.slow) for name in RIVALS]
)
def test_a_stop_and_a_resume_change_nothing(text, tmp_path, name):
    config = tiny(text, **SHORT, **chosen(name))
    run.start(config, tmp_path / "whole", say=quiet)
    run.start(config, tmp_path / "stopped", stop_after=4, say=quiet)
    run.resume(tmp_path / "stopped", say=quiet)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.parametrize("options", [{"strength": 1e-2, "mean": "initial", "decoupled": True}, chosen("qk-norm")])
def test_muon_stops_and_resumes_to_the_bit(text, tmp_path, options):
    config = tiny(text, **SHORT, optimizer="muon", weight_decay=0.1, **options)
    run.start(config, tmp_path / "whole", say=quiet)
    run.start(config, tmp_path / "stopped", stop_after=4, say=quiet)
    run.resume(tmp_path / "stopped", say=quiet)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_muon_is_torchs_on_the_layers_matrices_and_adamw_elsewhere(text, tmp_path):
    config = tiny(text, steps=6, warmup=0, schedule="constant", optimizer="muon", weight_decay=0.1, clip=0.0)
    data = open_data(config.data, length=config.shape.context, seed=config.loop.seed)
    ours = loop.Trainer(config, data, tmp_path / "run", ALONE)
    torch.manual_seed(config.loop.seed)
    model = LanguageModel(ours.module.config)
    inside = [one for one in model.layers.parameters() if one.dim() == 2]
    assert len(inside) == 6  # query, key, value, output, and two of the feed-forward part
    muon = torch.optim.Muon(inside, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    flat = [one for one in model.parameters() if one.dim() == 1]
    groups = [{"params": [model.embedding.weight], "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98))
    for step in range(6):
        tokens, targets = data.batches.training(4 * step, 4)
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        model.zero_grad()
        loss.backward()
        muon.step()
        adamw.step()
    ours.advance(6)
    for name, parameter in model.named_parameters():
        if not name.endswith("key.bias"):
            # Muon rounds to bfloat16, which blows up what differs in the last bit.
            torch.testing.assert_close(ours.module.get_parameter(name), parameter, atol=2e-4, rtol=1e-3)


def test_none_of_them_does_nothing(text, tmp_path):
    """Two steps of each from one seed: no two end with the same queries."""
    seen = {}
    for name in ("none", *RIVALS):
        config = tiny(text, warmup=0, **chosen(name))
        data = open_data(config.data, length=config.shape.context, seed=config.loop.seed)
        one = loop.Trainer(config, data, tmp_path / name, ALONE)
        for _ in range(2):
            one._train()
        seen[name] = float(one.module.layers[0].attention.query.weight.detach().double().abs().sum())
    assert len(set(seen.values())) == len(seen), seen


@pytest.mark.parametrize("name", ["qk-norm-l2", "soft-cap", "sigma-reparam", "spectral-norm"])
def test_the_export_computes_what_was_trained(text, tmp_path, name):
    config = tiny(text, steps=4, num_layers=2, **chosen(name))
    data = open_data(config.data, length=config.shape.context, seed=config.loop.seed)
    run.start(config, tmp_path / "run", say=quiet)
    trained = loop.Trainer(config, data, tmp_path / "run", ALONE).module.eval()
    tokens, _ = data.batches.validation(0, 4)
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "run" / "model")(tokens), trained(tokens), atol=1e-5, rtol=1e-5)
        (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
        if name in ("sigma-reparam", "spectral-norm"):
            with pytest.raises(Refusal, match="name the folder `model` of a finished run"):
                load(checkpoint)
        else:
            torch.testing.assert_close(load(checkpoint)(tokens), trained(tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["qk-norm", "soft-cap", "sigma-reparam"])
def test_validation_sees_what_the_kernel_sees(text, tmp_path, name):
    """Entropy and the largest logit behind the stabiliser, by a softmax that is written out."""
    config = tiny(text, steps=2, validate_every=2, scaled_embedding=True, **chosen(name))
    data = open_data(config.data, length=config.shape.context, seed=config.loop.seed)
    run.start(config, tmp_path / "run", say=quiet)
    row = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "validation"][-1]
    model = load(tmp_path / "run" / "model")
    texts = min(8192 // config.shape.context, data.batches.num_validation)
    tokens, _ = data.batches.validation(0, texts)
    with torch.no_grad():
        x = model.embed(tokens)
        attention = model.layers[0].attention
        query, key = (one(x).unflatten(-1, (2, -1)).transpose(1, 2) for one in (attention.query, attention.key))
        if name == "qk-norm":
            query, key = attention.qk_norm["query"](query), attention.qk_norm["key"](key)
        logits = query @ key.mT / query.shape[-1] ** 0.5
        logits = 0.1 * torch.tanh(logits / 0.1) if name == "soft-cap" else logits
        seen = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        largest = logits.where(seen, -torch.inf).amax((0, 2, 3))
    found = [head["max_logit"] for head in row["heads"]]
    # The mean over texts of each text's largest is at most the largest of all, and that is reached by one of them.
    assert all(value <= float(most) + 1e-5 for value, most in zip(found, largest, strict=True))
    if name == "soft-cap":
        assert max(found) < 0.1 < float((query @ key.mT).amax())


def test_every_option_is_one_of_its_class():
    for name, method in METHODS.items():
        known = inspect.signature(class_of(method.class_name).__init__).parameters
        assert method.defaults().keys() == method.settings.keys()
        assert method.takes_optimizer == ("optimizer" in known) or name == "locater", name


def test_the_short_form_of_decay_is_the_long_one():
    assert StabiliserOptions(qk_decay=2.0).settings == {"decay": 2.0}
    assert StabiliserOptions(qk_decay=2.0).method is METHODS["qk-decay"]


def test_a_printed_config_is_the_same_run(text, tmp_path):
    arguments = flags(text, **SHORT, **chosen("soft-cap"), optimizer="muon", mean="free", epsilon=1e-6)
    printed = locater("train", *arguments, "--print-config")
    assert printed.code == 0 and not printed.err
    (tmp_path / "own.yaml").write_text(printed.out)
    again = locater("train", "--config", tmp_path / "own.yaml", "--print-config")
    assert again.out == printed.out
    preset, values = read_file(tmp_path / "own.yaml")
    assert to_yaml(make_config(preset, **values)) == printed.out
    assert locater("train", "--config", tmp_path / "own.yaml", "--out", tmp_path / "a").code == 0
    assert locater("train", *arguments, "--out", tmp_path / "b").code == 0
    assert_same_run(tmp_path / "a", tmp_path / "b")
    # A run's own config.json is such a file too, and a run can print its own.
    from_json = locater("train", "--config", tmp_path / "a" / "config.json", "--print-config")
    assert from_json.out == locater("train", "--resume", tmp_path / "a", "--print-config").out


def test_flags_go_before_the_file_and_the_file_before_the_preset(tmp_path):
    path = tmp_path / "some.yaml"
    path.write_text("preset: small\nlearning-rate: 1e-4\nnum_heads: 2\nmean: 3.5\nstabiliser: {strength: 1}\n")
    printed = yaml.safe_load(locater("train", "--config", path, "--set", "num_heads=8", "--print-config").out)
    assert printed["preset"] == "small" and printed["shape"]["num_layers"] == 4  # the preset's
    assert printed["optimiser"]["learning_rate"] == 1e-4 and printed["stabiliser"]["mean"] == "3.5"  # the file's
    assert printed["shape"]["num_heads"] == 8 and printed["stabiliser"]["strength"] == 1.0
    other = yaml.safe_load(locater("train", "--config", path, "--preset", "gpt2", "--print-config").out)
    assert other["preset"] == "gpt2" and other["shape"]["num_layers"] == 12 and other["shape"]["num_heads"] == 2


def test_options_may_be_a_mapping_in_a_file(tmp_path):
    path = tmp_path / "some.json"
    path.write_text(json.dumps({"stabiliser": "qk-clip", "stabiliser_options": {"threshold": 7, "log_only": True}}))
    options = make_config("paper", **read_file(path)[1]).stabiliser
    assert options.settings == {"threshold": 7.0, "log_only": True}


FILES = {
    "unknown": ("learning_rat: 1\n", 2, "no option called 'learning_rat': did you mean learning_rate?"),
    "list": ("- 1\n", 1, "names of options with their values, got [1]"),
    "yaml": ("a: [\n", 1, "a readable YAML file"),
    "type": ("patience: -1\n", 1, "patience of at least 0"),
    "preset": ("preset: huge\n", 1, "a preset among paper, small, gpt2, got 'huge'"),
    "rival": ("stabiliser: qk-clop\n", 2, "stabiliser expects one of none, locater, qk-clip"),
}


@pytest.mark.parametrize(("content", "code", "words"), FILES.values(), ids=FILES)
def test_a_bad_file_is_refused_in_a_sentence(tmp_path, content, code, words):
    (tmp_path / "bad.yaml").write_text(content)
    result = locater("train", "--config", tmp_path / "bad.yaml", "--out", tmp_path / "run", columns=200)
    assert result.code == code and words in result.err and not (tmp_path / "run").exists()


BAD = {
    "no such": ("--set stabiliser=qk-clop", "expects one of none, locater, qk-clip"),
    "no option": ("--set stabiliser=qk-clip --set stabiliser_options=treshold=3", "it takes threshold, log_only"),
    "takes none": ("--set stabiliser=qk-norm --set stabiliser_options=a=3", "it takes none"),
    "needed": ("--set stabiliser=z-loss", "needs weight: stabiliser_options=weight=…"),
    "number": ("--set stabiliser=soft-cap --set stabiliser_options=cap=x", "expects a number, got 'x'"),
    "word": (
        "--set stabiliser=qk-clip --set stabiliser_options=log_only=perhaps",
        "expects a yes or no, got 'perhaps'",
    ),
    "both": ("--set stabiliser=soft-cap --strength 1", "leave them out with stabiliser=soft-cap"),
    "decay": ("--set stabiliser=soft-cap --set qk_decay=1", "leave out stabiliser, or qk_decay"),
    "nameless": ("--set stabiliser_options=cap=3", "name one"),
}


@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=BAD)
def test_bad_options_are_refused_in_a_sentence(tmp_path, arguments, words):
    result = locater("train", *arguments.split(), "--out", tmp_path / "run", columns=200)
    assert result.code == 2 and words in result.err and not (tmp_path / "run").exists()


def test_the_config_of_a_run_before_there_were_rivals_still_loads():
    document = json.loads(json.dumps(make_config("small", strength=1e-3).to_dict()))
    for group, name in (
        ("stabiliser", "stabiliser"),
        ("stabiliser", "stabiliser_options"),
        ("optimiser", "muon_momentum"),
    ):
        del document[group][name]
    assert Config.from_dict(document) == make_config("small", strength=1e-3)
    document["stabiliser"]["strength"] = "much"
    with pytest.raises(Refusal, match="strength"):
        Config.from_dict(document)


def test_the_printed_config_explains_every_option_and_every_rival():
    shown = locater("train", "--print-config").out
    for one in (one for kind in GROUPS.values() for one in dataclasses.fields(kind) if one.init):
        assert re.search(rf"^  {one.name}: .*  # {re.escape(one.metadata['help'])}", shown, flags=re.MULTILINE)
    for name, method in METHODS.items():
        assert f"\n#   {name}: " in shown
        assert all(f"\n#     {one}: " in shown for one in method.settings)


@pytest.mark.parametrize("name", ["a # b", "a\nb", "yes", "1e3", "'", "ü"])
def test_any_text_survives_in_a_printed_config(name, tmp_path):
    config = make_config("paper", data=name)
    (tmp_path / "own.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert make_config("paper", **read_file(tmp_path / "own.yaml")[1]) == config


def test_pairs_are_what_the_config_says():
    """Every field of every preset, written as a pair and read back."""
    for preset, config in PRESETS.items():
        values = {name: value for group in GROUPS for name, value in dataclasses.asdict(getattr(config, group)).items()}
        pairs = [f"{name}={value}" for name, value in values.items() if name != "model_type"]
        assert make_config("small", **read_pairs(pairs)) == dataclasses.replace(config, preset="small"), preset
