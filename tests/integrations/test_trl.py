"""TRL's trainers with the callback of transformers: the numbers are those of the policy's own pass, and of no other."""

import copy

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from locater.integrations.hugging_face import AttentionCallback
from locater.monitor import AttentionMonitor

REASON = "TRL is not installed: pip install trl -c constraints.txt"
trl = pytest.importorskip("trl", reason=REASON)
datasets = pytest.importorskip("datasets", reason=REASON)
pytestmark = pytest.mark.slow

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(40))]


@pytest.fixture
def policy(tmp_path):
    """The folder of a tiny Llama, and its tokenizer of single words."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    return tmp_path / "policy", tokenizer


def options(tmp_path, **further):
    return dict(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, max_steps=1, learning_rate=1e-3, report_to=[],
        use_cpu=True, bf16=False, save_strategy="no", logging_strategy="no", **further,
    )  # fmt: skip


class Passes:
    """Keeps the arguments of the passes that train, and the weights before the first of them."""

    def __init__(self, model):
        self.given, self.weights = [], None
        self.handle = model.register_forward_pre_hook(self.keep, with_kwargs=True)

    def keep(self, module, args, kwargs):
        if module.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self.weights = self.weights or copy.deepcopy(module.state_dict())
            names = ("input_ids", "attention_mask", "position_ids")  # others are TRL's, for the loss
            kwargs = dict(zip(names, args, strict=False)) | kwargs
            self.given.append({name: kwargs[name] for name in names if name in kwargs})


def assert_own_pass(trainer, callback, folder):
    """The report of the one step, against a monitor of a copy that only makes the passes that trained."""
    passes = Passes(trainer.model)
    trainer.train()
    passes.handle.remove()
    assert passes.given and callback.report is not None and callback.report.step == 0
    alone = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    alone.load_state_dict(passes.weights)
    with AttentionMonitor(alone, every=1) as monitor:
        for given in passes.given:
            alone(**given)
        expected = monitor.report()
    assert len(callback.report.training) == len(expected.training) == 2
    for ours, theirs in zip(callback.report.training, expected.training, strict=True):
        assert ours.num_passes == theirs.num_passes == len(passes.given)
        for name, values in theirs.statistics.items():
            assert ours.statistics[name] == pytest.approx(values, rel=1e-5, abs=1e-6, nan_ok=True), name
    return callback.report


def test_grpo(policy, tmp_path):
    """Generation, old policies and references run beside the pass that trains, and are kept apart from it."""
    folder, tokenizer = policy
    prompts = datasets.Dataset.from_list([{"prompt": " ".join(WORDS[3 + n : 8 + 2 * n])} for n in range(4)])
    callback = AttentionCallback(every=1)
    trainer = trl.GRPOTrainer(
        model=str(folder),
        reward_funcs=lambda completions, **kwargs: [float(len(set(one.split()))) for one in completions],
        args=trl.GRPOConfig(**options(tmp_path, num_generations=4, max_completion_length=6, beta=0.1)),
        train_dataset=prompts,
        processing_class=tokenizer,
        callbacks=[callback],
    )
    report = assert_own_pass(trainer, callback, folder)
    assert report.no_grad or report.evaluation, "generation was seen, in a part of its own"


def test_dpo(policy, tmp_path):
    """The reference model is another model, whose passes are not looked at."""
    folder, tokenizer = policy
    pairs = [
        {"prompt": WORDS[3 + n], "chosen": " ".join(WORDS[4 : 9 + n]), "rejected": " ".join(WORDS[10 : 13 + n])}
        for n in range(4)
    ]
    callback = AttentionCallback(every=1)
    trainer = trl.DPOTrainer(
        model=str(folder),
        args=trl.DPOConfig(**options(tmp_path)),
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=tokenizer,
        callbacks=[callback],
    )
    report = assert_own_pass(trainer, callback, folder)
    assert not report.evaluation
