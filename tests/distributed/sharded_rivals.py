"""Every rival, Muon and `strength="auto"` on two processes with half of the texts each, against one with all."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from locater.errors import Refusal
from locater.stabilisers import (
    L2,
    EntropyBonus,
    LocAteR,
    QKClip,
    QKDecay,
    QKNorm,
    SigmaReparam,
    SoftCap,
    Stabiliser,
    ZLoss,
)
from locater_lab.rivals import SpectralNorm
from locater_lab.train.parts import MuonWithAdamW

STEPS, TOLERANCE = 3, 1e-9
Make = Callable[..., Stabiliser]
Spread = Callable[[nn.Module], nn.Module]


class Rival(NamedTuple):
    """`early`: made before the model is spread and the optimiser made; else from both of them."""

    make: Make
    early: bool = True


RIVALS = {
    "QKClip": Rival(lambda model: QKClip(model, threshold=0.01)),
    "QKNorm": Rival(lambda model: QKNorm(model)),
    "QKNorm, L2": Rival(lambda model: QKNorm(model, kind=L2(8))),
    "SoftCap": Rival(lambda model: SoftCap(model, cap=0.1)),
    "ZLoss": Rival(lambda model: ZLoss(model, weight=1.0)),
    "EntropyBonus": Rival(lambda model: EntropyBonus(model, weight=1.0)),
    "SigmaReparam": Rival(lambda model: SigmaReparam(model)),
    "SpectralNorm": Rival(lambda model: SpectralNorm(model)),
    "QKDecay": Rival(lambda model, optimizer: QKDecay(model, decay=3.0, optimizer=optimizer), early=False),
    "auto, decoupled": Rival(
        lambda model, optimizer: LocAteR(model, strength="auto", optimizer=optimizer), early=False
    ),
    "auto, in the loss": Rival(lambda model, optimizer: LocAteR(model, strength="auto"), early=False),
}
COPIES = dict(use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu"))
ADDING = ("QKNorm", "SigmaReparam")  # which bring parameters of their own
OTHER = ("auto, in the loss", "DDP")  # each process goes by its own texts there
MUON_STEP = 0.2 * 0.01  # what "match_rms_adamw" makes of the learning rate


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def muon(model: nn.Module) -> Optimizer:
    matrices = [one for name, one in model.named_parameters() if "_proj" in name and one.dim() == 2]
    taken = {id(one) for one in matrices}
    others = [{"params": [one for one in model.parameters() if id(one) not in taken]}]
    return MuonWithAdamW(matrices, others, momentum=0.9, weight_decay=0.1, lr=0.01, eps=1e-3)


def trained(
    model: nn.Module, rival: Rival, tokens: Tensor, *, spread: Spread = lambda model: model, optimiser=adamw
) -> dict[str, Tensor]:
    """What some steps make of the parameters, and of what the stabiliser says."""
    torch.manual_seed(0)  # parametrisations draw
    stabiliser = rival.make(model) if rival.early else Stabiliser()
    model = spread(model)
    optimizer = optimiser(model)
    stabiliser = stabiliser if rival.early else rival.make(model, optimizer)
    for _ in range(STEPS):
        loss = model(input_ids=tokens).logits.square().mean()
        (loss + stabiliser.penalty()).backward()
        optimizer.step()
        optimizer.zero_grad()
        stabiliser.step()
    found = {name.removeprefix("module."): full(one.detach()) for name, one in model.named_parameters()}
    return found | {name: torch.tensor(value) for name, value in stabiliser.metrics(heads=True).items()}


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def gap(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def verdicts(make: Callable[[], nn.Module], tokens: Tensor, ways: dict[str, Spread]) -> Iterator[tuple[str, bool]]:
    """What was compared, and whether it is as on one process."""
    own = tokens[dist.get_rank()][None]
    for name, rival in RIVALS.items():
        expected = trained(make(), rival, tokens)
        for way, spread in ways.items():
            if (name, way) != OTHER:
                found = gap(trained(make(), rival, own, spread=spread), expected)
                yield f"{name} under {way}, gap {found:.1e}", found < TOLERANCE
    for way, spread in ways.items():
        yield f"auto in the loss under {way}", _agrees(make, tokens, spread, is_shared=way != OTHER[1])
        for name in ADDING:
            inside = make()
            around = spread(inside)  # held: the module inside is refused for as long as there is something around it
            yield f"{name} refused after {way}", _refused(RIVALS[name].make, around)
            yield f"{name} refused inside {way}", _refused(RIVALS[name].make, inside)
    for name in ADDING:  # FSDP's first form, which may leave each parameter whole on each process
        inside = make()
        around = FullyShardedDataParallel(inside, **COPIES)
        yield f"{name} refused inside copies by FSDP1", _refused(RIVALS[name].make, inside)
        del around


def muon_verdicts(make: Callable[[], nn.Module], ways: dict[str, Spread]) -> Iterator[tuple[str, bool]]:
    """Its products are in bfloat16, which rounds otherwise in shards: to a tenth of what a step moves an entry."""
    tokens = torch.randint(0, 32, (2, 64), generator=torch.Generator().manual_seed(0))  # gradients of full rank
    expected = trained(make(), RIVALS["QKClip"], tokens, optimiser=muon)
    for way, spread in ways.items():
        found = trained(make(), RIVALS["QKClip"], tokens[dist.get_rank()][None], spread=spread, optimiser=muon)
        weights = [name for name in expected if name.endswith("_proj.weight")]
        moved = torch.cat([(found[name] - expected[name]).flatten() for name in weights]).square().mean().sqrt()
        yield f"Muon under {way}, gap {moved / MUON_STEP:.1e} of a step", bool(moved < MUON_STEP / 10)


def _agrees(make: Callable[[], nn.Module], tokens: Tensor, spread: Spread, *, is_shared: bool) -> bool:
    """κ of the first step: that of all texts where gradients are shared, else the geometric mean over processes."""
    parts = [tokens] if is_shared else list(tokens[:, None])
    expected = math.prod(_strength(make(), part) for part in parts) ** (1 / len(parts))
    return math.isclose(_strength(spread(make()), tokens[dist.get_rank()][None]), expected, rel_tol=1e-9)


def _strength(model: nn.Module, tokens: Tensor) -> float:
    locater = LocAteR(model, strength="auto")
    (model(input_ids=tokens).logits.square().mean() + locater.penalty()).backward()
    locater.step()
    locater.detach()
    return locater.strength


def _refused(make: Make, model: nn.Module) -> bool:
    try:
        make(model)
    except Refusal as sentence:
        return "attach first, then wrap or shard" in str(sentence)
    return False
