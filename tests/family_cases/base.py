"""A case: the smallest Hugging Face model that exercises everything a family's table row says."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

TOKENS = 12


def tokens(config: Any) -> dict[str, Any]:
    return {"input_ids": torch.randint(3, 90, (2, TOKENS))}


def shake(model: torch.nn.Module) -> torch.nn.Module:
    """Random weights, large enough to tell keys apart, and no bias or gain left trivial."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


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
    as_given: bool = False  # config.json holds the settings as they stand here, in an older spelling
    module: Callable[[str], str] = lambda name: name  # from a name in the file to the module's

    def build(self) -> torch.nn.Module:
        """A random model in which every bias and gain matters and attention is far from uniform."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**deepcopy(self.settings))  # which fills in what it is given
        config._attn_implementation = "eager"
        model = getattr(transformers, self.model)._from_config(config, attn_implementation="eager").eval().float()
        shake(model)
        with torch.no_grad():
            self.prepare(model)
        return model

    def save(self, model: Any, directory: Path) -> None:
        model.save_pretrained(directory)
        if self.as_given:
            settings = {"model_type": model.config.model_type, **self.settings}
            (directory / "config.json").write_text(json.dumps(settings))
