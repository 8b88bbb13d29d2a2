"""Run by torchrun on two processes: the monitor's reports against one process's on all texts; exits 1 on any gap."""

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from locater.monitor import AttentionMonitor
from locater_lab.train.processes import leave

sys.path.insert(0, str(Path(__file__).parents[1]))
from written_models import Fused, Net  # noqa: E402

TOKENS = torch.randint(1, 30, (4, 12), generator=torch.Generator().manual_seed(0))


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=32))


def t5() -> nn.Module:
    """Its position bias lies in the first block and is used in all."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=32, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def written() -> nn.Module:
    """A model that no table knows: its layers are found by its calls, on every process alike."""
    return Net(Fused)


def fsdp(model: nn.Module, mesh):
    stacks = [model.model.layers] if hasattr(model, "model") else [model.encoder.block, model.decoder.block]
    for block in (block for stack in stacks for block in stack):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ddp(model: nn.Module, mesh) -> nn.Module:
    return DistributedDataParallel(model)


def tensor_parallel(model: nn.Module, mesh) -> nn.Module:
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
    for block in model.model.layers:
        parallelize_module(block, mesh, plan)
    return model


class Counted:
    """How many collective calls a report makes."""

    def __init__(self):
        self.number, self.call = 0, dist.all_gather

    def __call__(self, *args, **kwargs):
        self.number += 1
        return self.call(*args, **kwargs)


def train_step(model: nn.Module, tokens: torch.Tensor) -> None:
    if isinstance(getattr(model, "module", model), Net):
        model(tokens).square().mean().backward()
    else:
        model(input_ids=tokens, labels=tokens).loss.backward()


def gap(make, wrap, mesh, *, shares_texts: bool) -> float:
    """The largest difference between the reports, over all layers and statistics."""
    model = make().train()
    alone, rank = copy.deepcopy(model), dist.get_rank()
    tokens = TOKENS if shares_texts else TOKENS[2 * rank : 2 * rank + 2]
    group = dist.new_group([rank], use_local_synchronization=True)
    with AttentionMonitor(alone, every=1, group=group) as monitor:
        train_step(alone, TOKENS)
        expected = monitor.report()
    wrapped = wrap(model, mesh)
    with AttentionMonitor(wrapped, every=1) as monitor:
        train_step(wrapped, tokens)
        counted = dist.all_gather = Counted()
        found = monitor.report()
    dist.all_gather = counted.call
    assert counted.number == 1 or not monitor.seen.is_known, counted.number
    assert not found.notes, found.notes
    times = 2 if shares_texts else 1
    assert [layer.num_queries for layer in found.training] == [times * n.num_queries for n in expected.training]
    pairs = zip(found.training, expected.training, strict=True)
    return max(
        abs(ours - theirs)
        for one, other in pairs
        for name, values in one.statistics.items()
        for ours, theirs in zip(values, other.statistics[name], strict=True)
    )


def main() -> int:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    worst = 0.0
    for make, wrap in ((written, ddp), (llama, ddp), (llama, fsdp), (t5, fsdp), (llama, tensor_parallel)):
        found = gap(make, wrap, mesh, shares_texts=wrap is tensor_parallel)
        worst = max(worst, found)
        if dist.get_rank() == 0:
            print(f"{make.__name__} {wrap.__name__}: {found:.2e}")
    dist.barrier()  # no rank leaves while another still waits for its message
    dist.destroy_process_group()
    return int(worst > 1e-5)


if __name__ == "__main__":
    leave(main())
