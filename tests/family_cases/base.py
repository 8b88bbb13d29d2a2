"""A case: the smallest Hugging Face model that exercises everything a family's table row says."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

TOKENS = 12


def tokens(config: Any) -> dict[str, Any]:
    return {"input_ids": torch.randint(3, 90, (2, TOKENS))}


@dataclass(frozen=True)
class Case:
    """`config` and `model` are names in transformers; `settings` the config's arguments."""

    name: str
    config: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[Any], dict[str, Any]] = tokens
    coverage: str = "COMPLETE"
    prepare: Callable[[Any], None] = lambda model: None

    def build(self) -> torch.nn.Module:
        """A random model in which every bias and gain matters and attention is far from uniform."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.settings)
        config._attn_implementation = "eager"
        model = getattr(transformers, self.model)._from_config(config, attn_implementation="eager").eval().float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
                else:
                    parameter.add_(0.3 * torch.randn_like(parameter))
            self.prepare(model)
        return model
