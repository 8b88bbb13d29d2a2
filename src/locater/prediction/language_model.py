"""A language model to run: from a directory, a hub id, a GGUF file or a live module, with its tokenizer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from io import StringIO
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..errors import Refusal, refusal
from ..models import Layer, live

INSTALL = 'install it with: pip install "locater[hf]"'
Source = str | PathLike[str] | nn.Module


def load_model(source: Source) -> nn.Module:
    """The model without its output layer, in float32, ready to be run; GGUF weights are unpacked."""
    if isinstance(source, nn.Module):
        return source
    transformers = _transformers()
    place, options = _place(source)
    # The name of this argument before version 5 is not its name since.
    options["dtype" if int(transformers.__version__.partition(".")[0]) >= 5 else "torch_dtype"] = torch.float32
    with quiet(transformers):
        try:
            model = transformers.AutoModel.from_pretrained(place, **options)
        except Exception as reason:
            raise refusal(f"a model that transformers can load from {source}", _first_line(reason)) from None
    return model.eval()


def load_tokenizer(source: Source) -> Any:
    """The tokenizer that lies beside or within the source."""
    if isinstance(source, nn.Module):
        raise refusal("a tokenizer for a live model", "none", "pass tokenizer=, or tokens= instead of a text")
    transformers = _transformers()
    place, options = _place(source)
    with quiet(transformers):
        try:
            return transformers.AutoTokenizer.from_pretrained(place, **options)
        except Exception as reason:
            remedy = "add the files of its tokenizer (tokenizer.json), or name one with --tokenizer"
            raise refusal(f"a tokenizer in {source}", _first_line(reason), remedy) from None


def _place(source: str | PathLike[str]) -> tuple[str, dict[str, Any]]:
    """What transformers wants to be told: the folder and the GGUF file in it, or the hub id and its revision."""
    path = Path(source).expanduser()
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


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise refusal("transformers, for running models", "none", INSTALL) from None
    return transformers


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
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


def self_attention(model: nn.Module) -> tuple[list[Layer], list[str]]:
    """The layers whose queries and keys come from one input, and why others are left out."""
    found, left_out = [], []
    for layer in live.layers(model):
        left_out += layer.refused
        if layer.block in ("cross", "vision"):
            left_out.append(f"{layer.block} layer {layer.number}: its queries and keys are not tokens of one text")
        elif layer.heads:
            found.append(layer)
    if not found:
        raise Refusal(left_out[0]) if left_out else refusal("self-attention layers", "none")
    return found, left_out


Take = Callable[[int, Tensor], None]


@torch.no_grad()
def run(model: nn.Module, layers: Sequence[Layer], ids: Int[Tensor, "batch tokens"], take: Take) -> None:
    """One forward pass; `take(number, x)` gets the input of each layer's attention, as it comes."""
    by_name = dict(model.named_modules())
    seen: set[int] = set()

    def hook(number: int) -> Callable[..., None]:
        def receive(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            if number not in seen:
                seen.add(number)
                take(number, args[0] if args else next(iter(kwargs.values())))

        return receive

    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            module = by_name.get(layer.query_name)
            if module is None:
                raise refusal(
                    f"a module {layer.query_name} to listen to", "none", "only Hugging Face models can be run"
                )
            handle = module.register_forward_pre_hook(hook(number), with_kwargs=True)
            stack.callback(handle.remove)
        model(**_arguments(model, ids.to(next(model.parameters()).device)))
    assert len(seen) == len(layers), "a layer was not run"


def _arguments(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """What a text is for this model; a model with two sides reads it on both."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False}
    return {"input_ids": ids} if getattr(config, "use_cache", None) is None else {"input_ids": ids, "use_cache": False}


def _first_line(reason: Exception) -> str:
    return (str(reason).strip().splitlines() or [type(reason).__name__])[0][:200]
