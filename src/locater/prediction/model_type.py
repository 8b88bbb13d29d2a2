"""The model type of a folder whose config.json names none: by its tensors, if they leave no doubt."""

from os import PathLike
from pathlib import Path

from .. import checkpoints
from ..checkpoints.bytes import LocalFolder, read_config
from ..errors import Refusal, missing
from ..models import Config
from ..models.registry import find_family
from ..records import Json


def untyped(place: str | PathLike[str]) -> Json | None:
    """Read config.json, if it is there and has no model type."""
    try:
        settings = read_config(LocalFolder(Path(place).expanduser()))
    except Refusal:  # the loader says so
        return None
    return settings if settings and settings.get("model_type") is None else None


def type_by_names(place: str | PathLike[str], settings: Json) -> str:
    """The one model type whose tensors these are, and whose name they begin with; refused where several could be.

    To read heads the family is enough, to run a model it is not: RoBERTa's tensors are BERT's, its positions are not.
    """
    with checkpoints.open(place) as checkpoint:
        names = list(checkpoint.names)
    family = find_family(Config(settings), names)
    fitting = [kind for kind in family.model_types if any(name.startswith(f"{kind}.") for name in names)]
    if len(fitting) != 1:
        types = " or ".join(f'"model_type": "{kind}"' for kind in family.model_types) or "its model type"
        raise missing("a model type in config.json, for running a model", f"add {types} to it")
    return fitting[0]


def note(place: str | PathLike[str]) -> list[str]:
    """The sentence that says what was done."""
    settings = untyped(place)
    found = [] if settings is None else [type_by_names(place, settings)]
    return [f"run as {kind} by its tensor names: the config has no model type" for kind in found]
