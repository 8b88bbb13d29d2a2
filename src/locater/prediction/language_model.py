"""A language model to run: from a directory, a hub id, a GGUF file or a live module, with its tokenizer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import checkpoints
from ..budget import Answer, timed
from ..checkpoints.bytes import LocalBytes, LocalFolder, read_model_config
from ..checkpoints.gguf.header import read_header
from ..errors import Refusal, import_extra, missing, refusal
from ..models import Config
from ..models.registry import find_family
from ..packages import plugins
from ..records import Json
from .windows import Tokenizer

Source = str | PathLike[str] | nn.Module


def load_model(source: Source) -> nn.Module:
    """The model in float32, ready to be run, with its output layer where it predicts the next token.

    GGUF weights are unpacked; a folder that `locater train` wrote is read by the loader that is registered for it.
    """
    if isinstance(source, nn.Module):
        return source
    if (loader := registered_loader(source)) is not None:
        return loader.load_trained_model(Path(source).expanduser())
    transformers = transformers_here()
    place, options = _place(source)
    _check_pickles(Path(place))
    options[_dtype_option(transformers.__version__)] = torch.float32
    with quiet_loading(transformers):
        try:
            if (settings := untyped(place)) is not None and "gguf_file" not in options:
                return _load_untyped(transformers, place, settings, options)
            kind = _fetched(place, lambda: _loader(transformers, place, options))
            return _fetched(place, lambda: kind.from_pretrained(place, trust_remote_code=False, **options)).eval()
        except Refusal:
            raise
        except Exception as reason:
            raise refusal(f"a model that transformers can load from {source}", short_reason(reason)) from None


def _load_untyped(transformers: Any, place: str, settings: Json, options: Json) -> nn.Module:
    """Load the model as the type that its tensors name; refuse missing tensors, which transformers would make up."""
    config = transformers.AutoConfig.for_model(type_by_names(place, settings), **settings)
    load = transformers.AutoModel.from_pretrained
    model, told = load(place, config=config, trust_remote_code=False, output_loading_info=True, **options)
    absent = sorted(name for name in told["missing_keys"] if "pooler" not in name)
    if absent:
        raise missing(f"a tensor `{absent[0]}` of {config.model_type}", "name its type in config.json")
    return model.eval()


def _check_pickles(folder: Path) -> None:
    """Check with our own interpreter the pickles that transformers would let torch load."""
    if not any(folder.glob("*.safetensors")):
        for path in sorted(folder.glob("*.bin")):
            checkpoints.open(path).close()


def _fetched(place: str, request: Callable[[], Answer]) -> Answer:
    """Run a request for files that are not on disk, no longer than the budget says."""
    return request() if Path(place).exists() else timed(request)


def _dtype_option(version: str) -> str:
    """Name of the dtype option of `from_pretrained`: renamed in transformers 5.

    >>> [_dtype_option(version) for version in ("4.57.1", "5.22.2", "10.0.0")]
    ['torch_dtype', 'dtype', 'dtype']
    """
    return "dtype" if int(version.partition(".")[0]) >= 5 else "torch_dtype"


def _loader(transformers: Any, place: str, options: dict[str, Any]) -> Any:
    """Choose the class: only models that predict the next token have a loss that any text can show."""
    if "gguf_file" in options:
        return transformers.AutoModelForCausalLM
    named = {name: options[name] for name in ("revision",) if name in options}
    config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False, **named)
    architectures = config.architectures or [""]
    causal = architectures[0].endswith(("ForCausalLM", "LMHeadModel"))
    return transformers.AutoModelForCausalLM if causal else transformers.AutoModel


def registered_loader(source: str | PathLike[str]) -> Any:
    """The module that loads models of the type that a folder's config names, None where none is registered."""
    try:
        model_type = read_model_config(LocalFolder(Path(source).expanduser())).get("model_type")
    except Refusal:
        return None
    point = plugins("loaders").get(model_type) if isinstance(model_type, str) else None
    return None if point is None else point.load()


def load_tokenizer(source: Source) -> Tokenizer:
    """The tokenizer that lies beside or within the source; a GGUF file says whether a text begins with BOS."""
    if isinstance(source, nn.Module):
        raise missing("a tokenizer for a live model", "pass tokenizer=, or tokens= instead of a text")
    if (loader := registered_loader(source)) is not None:
        return loader.load_trained_tokenizer(Path(source).expanduser())
    transformers = transformers_here()
    place, options = _place(source)
    with quiet_loading(transformers):
        try:
            kind = transformers.AutoTokenizer
            tokenizer = _fetched(place, lambda: kind.from_pretrained(place, trust_remote_code=False, **options))
        except Refusal:
            raise
        except Exception as reason:
            remedy = "add the files of its tokenizer (tokenizer.json), name one with --tokenizer, or use --text random"
            raise refusal(f"a tokenizer in {source}", short_reason(reason), remedy) from None
    if "gguf_file" in options and begins_with_bos(Path(source)):
        tokenizer.add_bos_token = True
    return tokenizer


def begins_with_bos(path: Path) -> bool:
    """Read from the GGUF file itself whether texts begin with BOS; transformers drops it."""
    return bool(read_header(LocalBytes(path)).settings.get("tokenizer.ggml.add_bos_token", False))


def _place(source: str | PathLike[str]) -> tuple[str, Json]:
    """Translate a source for transformers: the folder and the GGUF file in it, or the hub id and its revision."""
    path = Path(source).expanduser()
    if "://" in fspath(source):
        raise refusal("a directory, a hub id or a GGUF file, for running a model", fspath(source), "download it first")
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise refusal("a GGUF file that exists", fspath(source), "check the spelling")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_file():
        raise refusal("a directory, a hub id or a GGUF file, for running a model", fspath(source), "name its directory")
    if path.is_dir():
        return str(path), {}
    name, _, revision = fspath(source).partition("@")
    return name, {"revision": revision} if revision else {}


def transformers_here() -> Any:
    return import_extra("transformers", "transformers, for running models", extra="hf")


@contextmanager
def quiet_loading(transformers: Any) -> Iterator[None]:
    """No bars and no advice while a model is loaded."""
    logging = transformers.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # Unpacking GGUF draws a bar that nothing turns off.
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def short_reason(reason: Exception) -> str:
    return (str(reason).strip().splitlines() or [type(reason).__name__])[0][:200]


def untyped(place: str | PathLike[str]) -> Json | None:
    """Read config.json, if it is there and has no model type."""
    try:
        settings = read_model_config(LocalFolder(Path(place).expanduser()))
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


def type_note(place: str | PathLike[str]) -> list[str]:
    """The sentence that says what was done."""
    settings = untyped(place)
    found = [] if settings is None else [type_by_names(place, settings)]
    return [f"run as {kind} by its tensor names: the config has no model type" for kind in found]
