"""Run by torchrun: LocAteR and its rivals on sharded models against one process; exits 1 on any gap."""

import copy
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from sharded_rivals import muon_verdicts, verdicts
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from locater.stabilisers import Constant, LocAteR, Penalised, Projected
from locater_lab.train.processes import leave

TOKENS = torch.arange(12).reshape(2, 6) % 7


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_attention_heads=8, num_key_value_heads=4, intermediate_size=32)
    return grown(LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=32)))


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=24, n_layer=2, n_head=4, vocab_size=32, bos_token_id=0, eos_token_id=0)
    return grown(GPT2LMHeadModel(config).eval())


def grown(model: nn.Module) -> nn.Module:
    """Weights so large that the penalty counts beside the loss."""
    for name, parameter in model.named_parameters():
        if "_proj" in name or "c_attn" in name:
            parameter.data.mul_(10)
    return model.double()


def ddp(model: nn.Module, mesh) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: nn.Module, mesh, **options):
    blocks = model.model.layers if hasattr(model, "model") else model.transformer.h
    for block in blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp_columns(model: nn.Module, mesh):
    return fsdp(model, mesh, shard_placement_fn=lambda weight: Shard(weight.dim() - 1))


def tensor_parallel(model: nn.Module, mesh) -> nn.Module:
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
    for block in model.model.layers:
        parallelize_module(block, mesh, plan)
    return model


def both(model: nn.Module, mesh):
    return fsdp(tensor_parallel(model, mesh["tp"]), mesh["dp"])


def full(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run(model: nn.Module) -> dict[str, torch.Tensor]:
    """One step with the penalty in the loss, then a decoupled step with the trace projected."""
    # A large epsilon: the bias of keys has no gradient but rounding, which Adam would make a step of.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    mean = Penalised(0.5, Constant(0.7))
    loss = model(input_ids=TOKENS).logits.square().mean()
    penalty = LocAteR(model, strength=0.3, mean=mean).penalty()
    (loss + penalty).backward()
    found = {"penalty": penalty.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name.removeprefix('module.')}"] = full(parameter.grad).clone()
    optimizer.step()
    locater = LocAteR(model, strength=0.3, mean=Projected(Constant(0.1)), optimizer=optimizer)
    locater.step()
    found |= {name.removeprefix("module."): full(p.detach()).clone() for name, p in model.named_parameters()}
    found |= {name: torch.tensor(value) for name, value in locater.metrics(heads=True).items()}
    return found


def rivals() -> Iterator[tuple[str, bool]]:
    mesh = init_device_mesh("cpu", (2,))
    ways = {"DDP": lambda model: ddp(model, mesh), "FSDP2": lambda model: fsdp(model, mesh)}
    for make in (llama, gpt2):
        yield from verdicts(make, TOKENS, ways)
    yield from muon_verdicts(llama, ways)


def way(model: nn.Module) -> str:
    """How the weights of the first pair are held here; and a step must exchange no more than that needs."""
    locater = LocAteR(model, strength=0.0, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    pair = locater.pairs[0]
    part = pair.shard()
    found = "columns" if part.across_columns else "heads" if part.across_heads else "whole"
    sizes, send = [], dist.all_reduce
    dist.all_reduce = lambda tensor, **options: sizes.append(tensor.numel()) or send(tensor, **options)
    with CommDebugMode() as messages:
        locater.step()
    dist.all_reduce = send
    small = 3 * pair.query.d_head**2 * pair.shape[0] * pair.shape[1]
    allowed = {"columns": max(sizes, default=0) <= small, "heads": not sizes}.get(found, True)
    only = found == "whole" or messages.get_total_counts() == len(sizes)
    return found if allowed and only else f"{found}, but {messages.get_comm_counts()} of {sizes}"


def cases(world: int):
    mesh = init_device_mesh("cpu", (world,))
    yield "DDP", llama, ddp, mesh, "whole"
    yield "FSDP2, rows in whole heads", llama, fsdp, mesh, "heads"
    yield "FSDP2, columns", llama, fsdp_columns, mesh, "columns"
    yield "FSDP2, fused (in, out)", gpt2, fsdp, mesh, "columns"
    yield "FSDP2, fused (in, out), rows", gpt2, fsdp_columns, mesh, "whole"
    yield "tensor parallel", llama, tensor_parallel, mesh, "heads"
    if world == 4:
        yield (
            "FSDP2 × tensor parallel",
            llama,
            both,
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
            "whole",
        )


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    failed = 0
    for name, make, wrap, mesh, expected_way in cases(dist.get_world_size()):
        expected = run(copy.deepcopy(make()))
        model = wrap(make(), mesh)
        found_way = way(model)
        found = run(model)
        gap = max(float((found[key] - value).abs().max()) for key, value in expected.items())
        good = gap < 1e-10 and found.keys() == expected.keys() and found_way == expected_way
        failed += not good
        if dist.get_rank() == 0:
            print(f"{'ok' if good else 'FAILED'} {name}: {found_way}, gap {gap:.1e}", flush=True)
    for name, good in rivals() if dist.get_world_size() == 2 else ():
        failed += not good
        if dist.get_rank() == 0:
            print(f"{'ok' if good else 'FAILED'} {name}", flush=True)
    dist.barrier()  # no rank leaves while another still waits for its message
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    leave(main())
