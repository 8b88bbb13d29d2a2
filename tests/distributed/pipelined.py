"""Run by torchrun on two processes: stages of a pipeline, and heads spread, against one process; exits 1 on any gap.

Stages are named as people name them: each from 0, or by the layers' numbers in the whole model. Then a call with a
share of each text's tokens on each process, as under context parallelism, which is refused by name.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard

from locater.attention.interception import Interception
from locater.monitor import AttentionMonitor
from locater.projections import whole as whole_of
from locater.stabilisers import QKClip
from locater_lab.train.processes import leave

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from monitored import TOKENS, llama, tensor_parallel  # noqa: E402

from written_models import Fused, Written  # noqa: E402

LENGTH, TEXTS = 9, 4


class Stage(nn.Module):
    """Some of the layers, under their numbers in the whole model, or each stage's from 0."""

    def __init__(self, layers: dict[str, nn.Module]):
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x):
        for layer in self.layers.values():
            x = x + layer(x)
        return x


def whole() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    layers: dict[str, nn.Module] = {str(number): (Fused if number % 2 else Written)() for number in range(4)}
    with torch.no_grad():
        for number, layer in enumerate(layers.values()):
            for parameter in layer.parameters():
                parameter.mul_(1 + number)
    return layers


def expected(x: torch.Tensor, alone: dist.ProcessGroup) -> list:
    model = Stage(whole())
    with AttentionMonitor(model, every=1, group=alone) as monitor:
        for part in x.chunk(2):
            model(part).square().mean().backward()
        return list(monitor.report().training)


def gap(x: torch.Tensor, alone: dist.ProcessGroup, *, named_globally: bool) -> float:
    rank = dist.get_rank()
    own = {name: layer for name, layer in whole().items() if int(name) // 2 == rank}
    names = list(own) if named_globally else ["0", "1"]
    stage = Stage(dict(zip(names, own.values(), strict=True)))
    pipeline = PipelineStage(stage, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(pipeline, n_microbatches=2, loss_fn=lambda out, _: out.square().mean())
    found: Any = None
    clip = QKClip(stage, log_only=True, sample=(torch.randn(1, LENGTH, 32),))
    with AttentionMonitor(stage, every=1) as monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(2):
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=x, losses=[])
            found = monitor.step()
            clip.step()
            assert found is not None
            assert [layer.layer for layer in found.training] == [0, 1, 2, 3], (number, found)
    assert any("under the same names" in note for note in found.notes) == (not named_globally), found.notes
    values = clip.metrics()
    pairs = list(zip(found.training, expected(x, alone), strict=True))
    assert not found.no_grad
    growth = [abs(value) for one, _ in pairs for value in one.weights["max_logit_growth"]]
    assert max(growth) < 1e-3, "the passes of both steps are alike, and those over no data are left out"
    clipped = [max(one.statistics["max_logit"]) for _, one in pairs[2 * rank : 2 * rank + 2]]
    gaps = [abs(ours - theirs) for ours, theirs in zip(values.values(), clipped, strict=True)]
    gaps += [
        abs(a - b)
        for one, other in pairs
        for part in ("statistics", "weights")
        for name, numbers in getattr(other, part).items()
        if name in getattr(one, part)
        for a, b in zip(getattr(one, part)[name], numbers, strict=True)
    ]
    assert all("eta" in one.weights for one, _ in pairs), found.notes
    return max(gaps)


def clip_gap(alone: dist.ProcessGroup) -> float:
    """Weights clipped with heads spread over both processes, against one process."""
    found = []
    for group, wrap in ((alone, None), (None, tensor_parallel)):
        model = llama()
        model = model if wrap is None else wrap(model, init_device_mesh("cpu", (2,)))
        clip = QKClip(model, threshold=0.003, group=group)
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        clip.step()
        assert max(clip.metrics().values()) > 0.006, "something to clip"
        sides = [getattr(layer.self_attn, f"{side}_proj") for layer in model.model.layers for side in "qk"]
        found.append(torch.cat([whole_of(side.weight.detach()).flatten() for side in sides]))
    return float((found[0] - found[1]).abs().max())


def is_refused() -> bool:
    """A call in which each process has half of the tokens of each text."""
    mesh = init_device_mesh("cpu", (2,))
    parts = [DTensor.from_local(torch.randn(2, 4, 5, 8), mesh, [Shard(2)]) for _ in range(3)]
    calls = []
    try:
        with Interception(calls.append):
            nn.functional.scaled_dot_product_attention(*parts)
    except RuntimeError:  # what torch's kernel for a CPU makes of it
        pass
    return len(calls) == 1 and calls[0].is_share and "context parallelism" in str(calls[0].unreadable)


def main() -> int:
    dist.init_process_group("gloo")
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    x = torch.randn(TEXTS, LENGTH, 32, generator=torch.Generator().manual_seed(1))
    worst = 0.0
    for named_globally in (True, False):
        worst = max(worst, gap(x, alone, named_globally=named_globally))
        if dist.get_rank() == 0:
            print(f"named globally {named_globally}: {worst:.2e}", flush=True)
    worst = max(worst, clipped := clip_gap(alone))
    refused = is_refused()
    if dist.get_rank() == 0:
        print(f"QK-Clip under tensor parallelism: {clipped:.2e}", flush=True)
        print(f"context parallelism refused: {refused}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return int(worst > 1e-4 or not refused)


if __name__ == "__main__":
    leave(main())
