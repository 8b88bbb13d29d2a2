"""Run by torchrun on two processes: what actions do on half of the texts each, against one process with all of them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM

from locater.errors import Refusal
from locater.monitor import Attach, AttentionMonitor, RollBack
from locater.stabilisers import LocAteR, QKClip, QKNorm
from locater_lab.train.processes import leave

TOKENS = torch.randint(1, 30, (4, 12), generator=torch.Generator().manual_seed(0))
STEPS, BAD, TOLERANCE = 8, 3, 1e-9
ACTIONS = {
    "RollBack": lambda: RollBack(0.2),
    "QKClip": lambda: Attach(QKClip, threshold=5.0),
    "LocAteR": lambda: Attach(LocAteR, strength=1e-2),
}


Ended = tuple[dict[str, torch.Tensor], list[str], set[str]]  # weights, what was said, and what was advised


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=32)).double().train()


def fsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def alone(model: nn.Module) -> nn.Module:
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def run(action, wrap, tokens: torch.Tensor, group) -> Ended:
    """Some steps, one of which makes the logits of layer 1 huge; the weights at the end, and what was said."""
    model = wrap(llama())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    monitor = AttentionMonitor(model, every=1, optimizer=[optimizer, schedule], on_alarm=ACTIONS[action](), group=group)
    said, advice = [], set[str]()
    for step in range(STEPS):
        if step == BAD:
            inner = getattr(model, "module", model)
            with torch.no_grad():
                inner.model.layers[1].self_attn.q_proj.weight.mul_(1e5)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        report = monitor.step()
        said += report.actions
        advice |= {alarm.remedy for alarm in report.alarms if alarm.kind == "logit explosion"}
    monitor.detach()
    return {name.removeprefix("module."): whole(one) for name, one in model.state_dict().items()}, said, advice


def is_refused(wrap) -> bool:
    """Gains that come late would be each process's own: said at the first call, and never at an alarm."""
    model = wrap(llama())
    monitor = AttentionMonitor(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), on_alarm=Attach(QKNorm))
    try:
        model(input_ids=TOKENS)
    except Refusal as refused:
        return "not spread over processes yet" in str(refused)
    finally:
        monitor.detach()
    return False


def main() -> int:
    dist.init_process_group("gloo")
    rank, wrong = dist.get_rank(), 0
    mine = dist.new_group([rank], use_local_synchronization=True)
    for action in ACTIONS:
        expected, lines, _ = run(action, alone, TOKENS, mine)
        for wrap in (DistributedDataParallel, fsdp):
            found, said, advice = run(action, wrap, TOKENS[2 * rank : 2 * rank + 2], None)
            gap = max(float((found[name] - one).abs().max()) for name, one in expected.items())
            held = found.keys() == expected.keys() and gap < TOLERANCE and len(said) == 1 and said == lines
            held = held and not any(words.startswith("QKNorm") for words in advice)  # it would be refused
            wrong += not held
            print(f"{action} {wrap.__name__} rank {rank}: {'holds' if held else 'FAILS'} {gap:.1e} {said}", flush=True)
    for wrap in (DistributedDataParallel, fsdp):
        wrong += not (refused := is_refused(wrap))
        print(f"QKNorm {wrap.__name__} rank {rank}: {'refused' if refused else 'FAILS'}", flush=True)
    dist.barrier()  # no rank leaves while another still waits for its message
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    leave(main())
