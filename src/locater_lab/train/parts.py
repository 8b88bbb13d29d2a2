"""From a config to the things that a loop moves: model, optimiser and its learning rate, stabiliser."""

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Muon, Optimizer

from locater.errors import refusal
from locater.records import State
from locater.stabilisers import Constant, Free, Initial, LocAteR, Penalised, Projected, Stabiliser, Until, WarmUp

from ..data.sources import Data
from .config import Config, OptimiserOptions, StabiliserOptions
from .methods import LOCATER, NONE, class_of
from .model import LanguageModel


class MuonWithAdamW(Optimizer):
    """torch's own Muon on `matrices`, AdamW on `others`: one list of groups, one state.

    Muon's steps are scaled to the size of AdamW's ("match_rms_adamw"), so that both share a learning rate.
    """

    def __init__(
        self, matrices: list[Tensor], others: list[State], *, momentum: float, weight_decay: float, **adamw: Any
    ):
        rate = adamw["lr"]
        muon = Muon(matrices, lr=rate, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self.parts = [muon, AdamW(others, **adamw)]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        # The same dictionaries, not copies: who sets a learning rate here sets it there.
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        self.state = defaultdict(dict)
        for part in self.parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """The matrices inside the layers: no embedding, no output layer, nothing of one dimension."""
    layers = getattr(model, "layers", nn.ModuleList())
    return [one for one in layers.parameters() if one.requires_grad and one.dim() == 2]


def make_model(config: Config, data: Data) -> LanguageModel:
    """The model for this data, initialised from the seed alone."""
    torch.manual_seed(config.loop.seed)
    assert data.tokens is not None, "what is read has tokens"
    known, wanted = data.tokens.vocabulary.size, config.shape.vocab_size
    if wanted and known > wanted:
        remedy = f"raise it to {known}, leave it out, or use tokenizer=bpe with bpe_size={wanted}"
        raise refusal(f"data of at most {wanted} different tokens (vocab_size)", known, remedy)
    return LanguageModel(replace(config.shape, vocab_size=wanted or known))


def make_optimizer(model: nn.Module, options: OptimiserOptions) -> Optimizer:
    """Adam, AdamW, or Muon with AdamW; weight decay for matrices only."""
    matrices = hidden_matrices(model) if options.optimizer == "muon" else []
    elsewhere = {id(one) for one in matrices}
    trained = [one for one in model.parameters() if one.requires_grad and id(one) not in elsewhere]
    groups = [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [one for one in trained if one.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    adam: dict[str, Any] = dict(lr=options.learning_rate, betas=(options.beta1, options.beta2))
    if matrices:
        muon: dict[str, Any] = dict(momentum=options.muon_momentum, weight_decay=options.weight_decay)
        return MuonWithAdamW(matrices, groups, **muon, **adam)
    return Adam(groups, **adam) if options.optimizer == "adam" else AdamW(groups, **adam)


def learning_rate(step: int, options: OptimiserOptions, *, num_steps: int) -> float:
    """Linear from 0 over the warm-up, then ∝ 1/√step, a half cosine down to the final share, or constant.

    Steps count from 0, and the first one moves already: its rate is 1/warm-up of the highest.
    """
    highest, warmup = options.learning_rate, options.warmup
    if step < warmup:
        return highest * (step + 1) / warmup
    match options.schedule:
        case "inverse-sqrt":
            return highest * math.sqrt(max(1, warmup) / (step + 1))
        case "cosine":
            progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
            share = options.final_share
            return highest * (share + (1 - share) * (1 + math.cos(math.pi * progress)) / 2)
    return highest


def attach(model: nn.Module, options: StabiliserOptions) -> Stabiliser | None:
    """A stabiliser that is part of the model: made before this is spread over processes and its optimiser made.

    None where it comes behind the optimiser. What it draws comes from the seed that the model was made from.
    """
    method, settings = options.method, options.settings
    if method.takes_optimizer or options.name == LOCATER:
        return None
    if options.name == NONE:
        return Stabiliser()
    if method.kind:
        settings = {"kind": class_of(method.kind)(**settings)}
    return class_of(method.class_name)(model, **settings)


def make_stabiliser(model: nn.Module, options: StabiliserOptions, optimizer: Optimizer) -> Stabiliser:
    """A stabiliser that goes by the optimiser: LocAteR, or a decay."""
    if options.name != LOCATER:
        return class_of(options.method.class_name)(model, **options.settings, optimizer=optimizer)
    return LocAteR(
        model,
        strength=options.strength,
        mean=_mean(options),
        optimizer=optimizer if options.decoupled else None,
    )


def lower_strength(stabiliser: Stabiliser, options: StabiliserOptions, step: int) -> None:
    """Set κ for this step where it is lowered over the run; a function of the step, so a resumed run has it too."""
    if options.strength_until:
        assert isinstance(stabiliser, LocAteR)
        stabiliser.strength = options.strength_at(step)


def _mean(options: StabiliserOptions) -> Free | Penalised | Projected:
    if options.mean == "free":
        return Free()
    if options.mean == "initial":
        target = Initial()
    elif options.mean_warmup:
        target = WarmUp(float(options.mean), options.mean_warmup)
    else:
        target = Constant(float(options.mean))
    if options.mean_until:
        target = Until(target, options.mean_until)
    return Penalised(options.mean_weight, target) if options.hold == "penalty" else Projected(target)
