"""Optimisers that keep fp32 copies of half-precision parameters, as training stacks do, each in another place."""

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

OPTIONS = dict(lr=3e-3, betas=(0.9, 0.99), weight_decay=0.0)


class InState(Optimizer):
    """Copies in the optimiser's state, from the first step on."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, OPTIONS)

    def copy_of(self, parameter: Tensor) -> Tensor:
        return self.state[parameter].setdefault("master", parameter.detach().float().clone())

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)  # which rounds everything to the parameters' type
        for state in self.state.values():
            state.update({name: value.float() for name, value in state.items() if isinstance(value, Tensor)})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict) -> None:
        state, copy, by, (beta, decay) = (
            self.state[parameter],
            self.copy_of(parameter),
            parameter.grad.float(),
            group["betas"],
        )
        for name in ("exp_avg", "exp_avg_sq"):
            state.setdefault(name, torch.zeros_like(copy))
        state["step"] = state.get("step", 0) + 1
        state["exp_avg"].lerp_(by, 1 - beta)
        state["exp_avg_sq"].lerp_(by.square(), 1 - decay)
        size = (state["exp_avg_sq"] / (1 - decay ** state["step"])).sqrt() + 1e-8
        copy.sub_(state["exp_avg"] / (1 - beta ** state["step"]) / size, alpha=group["lr"])
        parameter.copy_(copy)


class Hidden(InState):
    """Copies where nobody can see them."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters)
        hidden: dict[int, Tensor] = {}
        self.copy_of = lambda parameter: hidden.setdefault(id(parameter), parameter.detach().float().clone())


class InGroups:
    """Copies in the groups in place of the parameters; around an optimiser, and not one of torch's kind (Apex)."""

    def __init__(self, parameters) -> None:
        self.pairs = [(one, nn.Parameter(one.detach().float().clone())) for one in parameters]
        self.optimizer = AdamW([copy for _, copy in self.pairs], **OPTIONS)

    @property
    def param_groups(self) -> list:
        return self.optimizer.param_groups

    @property
    def state(self) -> dict:
        return self.optimizer.state

    def state_dict(self) -> dict:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, copy in self.pairs:
            copy.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        for parameter, copy in self.pairs:
            parameter.copy_(copy)

    def zero_grad(self) -> None:
        for parameter, _ in self.pairs:
            parameter.grad = None


class Named(InGroups):
    """Copies that their parameters name (Megatron)."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters)
        for parameter, copy in self.pairs:
            parameter.main_param = copy


def plain(parameters) -> AdamW:
    return AdamW(parameters, **OPTIONS)


SEEN = {"state": InState, "groups": InGroups, "named": Named}
