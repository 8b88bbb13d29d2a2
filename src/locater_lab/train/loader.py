"""Models and tokenizers of `locater train`, as the library asks for them by their type."""

import copy
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrize

from locater import checkpoints
from locater.errors import refusal
from locater.records import Json, as_written, read_json, write, write_json
from locater.stabilisers.reparametrisation import remove

from ..data import vocabulary
from ..data.vocabulary import Vocabulary
from .config import StabiliserOptions
from .methods import written
from .model import LanguageModel
from .parts import attach
from .shape import Shape

# Of a stabiliser that goes with the model: without it the weights would compute something else.
NAME, OPTIONS = "stabiliser", "stabiliser_options"


def export(
    model: nn.Module, folder: Path, vocabulary: Vocabulary | None = None, *, stabiliser: StabiliserOptions | None = None
) -> None:
    """`model.safetensors`, `config.json`, and the vocabulary; each file whole or as it was.

    Weights that a stabiliser computes from others are stored as computed.
    """
    plain = _baked(model)
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in plain.named_parameters()}
    write(folder / "model.safetensors", lambda temporary: save_file(tensors, temporary, metadata={"format": "pt"}))
    write_json(model_settings(model, stabiliser), folder / "config.json")
    if vocabulary is not None:
        vocabulary.save(folder)


def _baked(model: nn.Module) -> nn.Module:
    """The model, or a copy whose parametrised weights are plain ones."""
    if not any(parametrize.is_parametrized(module) for module in model.modules()):
        return model
    plain = copy.deepcopy(model).eval()  # in training, each look at a weight would move the power iteration
    for module in list(plain.modules()):
        held = module.parametrizations if parametrize.is_parametrized(module) else {}
        for attribute in list(held):  # type: ignore[arg-type]
            remove(module, attribute, bake=True)
    return plain


def model_settings(model: nn.Module, stabiliser: StabiliserOptions | None = None) -> Json:
    """The config as it is stored beside weights."""
    shape = model.config
    document = shape.to_dict() if isinstance(shape, Shape) else asdict(shape)  # type: ignore
    if stabiliser is not None and stabiliser.method.stays:
        document |= {NAME: stabiliser.name, OPTIONS: written(stabiliser.settings)}
    return document


def load(folder: Path) -> LanguageModel:
    """Load what `export` wrote, or a checkpoint of a run, ready for inference, with the stabiliser that stays."""
    with as_written(folder / "config.json"):
        document = read_json(folder / "config.json")
        stays = StabiliserOptions(stabiliser=document.pop(NAME, ""), stabiliser_options=document.pop(OPTIONS, ""))
        model = LanguageModel(Shape.from_dict(document))
        attach(model, stays)
    with checkpoints.open(folder) as stored:
        missing, unexpected = model.load_state_dict({name: stored.read(name) for name in stored.names}, strict=False)
    tied = ["output.weight"] if getattr(model.config, "tied", False) else []  # stored once, as the embedding
    absent = [name for name in missing if name not in tied]
    if unexpected or absent:
        got = f"{unexpected[0]} besides" if unexpected else f"all but {absent[0]}"
        remedy = "name the folder `model` of a finished run" if unexpected else "the checkpoint is not whole"
        raise refusal(f"the weights that {folder / 'config.json'} tells of", got, remedy)
    return model.eval()


def load_trained_model(folder: Path) -> nn.Module:
    """The model of a finished run, ready for inference."""
    return load(folder)


def load_trained_tokenizer(folder: Path) -> "OwnTokenizer":
    """The vocabulary beside the weights."""
    return OwnTokenizer(vocabulary.load_vocabulary(folder))


class OwnTokenizer:
    """The vocabulary of `locater train` under the names that transformers has."""

    unk_token_id: int | None = None

    def __init__(self, vocabulary: vocabulary.Vocabulary) -> None:
        self.vocabulary = vocabulary

    def __len__(self) -> int:
        return self.vocabulary.size

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        return {"input_ids": self.vocabulary.encode(text).tolist()}
