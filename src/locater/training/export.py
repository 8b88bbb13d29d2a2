"""A trained model as a folder of safetensors that `locater scan`, or anyone, reads."""

import json
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import nn

from ..records import Json, write, write_json
from .data.vocabulary import Vocabulary
from .model import LanguageModel, WalkModel, WalkShape
from .shape import Shape


def export(model: nn.Module, folder: Path, vocabulary: Vocabulary | None = None) -> None:
    """`model.safetensors`, `config.json`, and the vocabulary; each file whole or as it was."""
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in model.named_parameters()}
    write(folder / "model.safetensors", lambda temporary: save_file(tensors, temporary, metadata={"format": "pt"}))
    write_json(model_settings(model), folder / "config.json")
    if vocabulary is not None:
        vocabulary.save(folder)


def model_settings(model: nn.Module) -> Json:
    """The config as it is stored beside weights."""
    shape = model.config
    return shape.to_dict() if isinstance(shape, Shape) else asdict(shape)  # type: ignore


def load(folder: Path) -> LanguageModel | WalkModel:
    """What `export` wrote, ready for inference."""
    document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if document["positions"] == "none":
        del document["model_type"]
        model: LanguageModel | WalkModel = WalkModel(WalkShape(**document))
    else:
        model = LanguageModel(Shape.from_dict(document))
    # A tied output layer is stored once, as the embedding.
    missing, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not unexpected and set(missing) <= {"output.weight"}, (missing, unexpected)
    return model.eval()
