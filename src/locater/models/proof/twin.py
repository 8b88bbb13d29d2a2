"""A tiny twin of a model that transformers knows: its own classes, its config shrunk, random weights, one forward pass.

Nothing is downloaded and no code from outside transformers is run.
"""

import importlib
import inspect
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.interception import Interception
from ...errors import Refusal, refusal
from ...records import JsonMapping
from .evidence import Evidence, ObservedPass
from .shrink import ATTEMPTS, VOCABULARY, Sizes, shrink

NUM_TOKENS, BATCH, MOST_PARAMETERS, MOST_SECONDS = 12, 2, 12_000_000, 8.0
NOT_TAKEN = ("model_type", "auto_map", "dtype", "torch_dtype", "quantization_config")
OLDER_ROTATIONS = {"rope_theta", "rope_scaling", "rope_type", "partial_rotary_factor"}  # read into rope_parameters
HOPELESS = ("ImportError", "can be made small")  # failures that other sizes do not mend
Offers = Callable[[Any], Iterable[Mapping[str, Tensor]]]  # the inputs worth trying on a model
AUTO_CLASSES = (
    "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM", "CAUSAL_LM", "CTC",
    "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "TEXT_ENCODING", "PRETRAINING",
)  # fmt: skip


def full_config(model_type: str, values: JsonMapping | None = None) -> Any:
    """The config object that transformers makes of a stored config, all defaults filled in."""
    from transformers import CONFIG_MAPPING

    own = {key: value for key, value in (values or {}).items() if key not in NOT_TAKEN}
    try:
        return CONFIG_MAPPING[model_type].from_dict(own) if own else CONFIG_MAPPING[model_type]()
    except Exception as reason:  # its own check of untrusted values, which fails in any way
        expected = f"a config that transformers reads as {model_type}"
        raise refusal(expected, error_line(reason), "correct config.json") from reason


def known_entries(model_type: str, values: JsonMapping) -> set[str]:
    """Names at any depth that transformers' class of this type knows, and the classes of the tables inside `values`."""
    from transformers import CONFIG_MAPPING

    config = full_config(model_type)
    known = {*_names(config.to_dict()), *type(config).attribute_map, "per_layer_config"}
    known |= OLDER_ROTATIONS if "rope_parameters" in known else set()
    for table in values.values():
        if isinstance(table, dict) and table.get("model_type") in CONFIG_MAPPING:
            known |= known_entries(table["model_type"], table)
    return known


def _names(values: JsonMapping) -> Iterator[str]:
    for key, value in values.items():
        yield key
        yield from _names(value) if isinstance(value, dict) else ()


def model_classes(config: Any) -> Iterator[type]:
    """The class that the config names, then what the auto classes make of it."""
    import transformers
    from transformers.models.auto import modeling_auto

    names = [name for name in getattr(config, "architectures", None) or () if isinstance(name, str)]
    mappings = [f"MODEL_FOR_{kind}_MAPPING_NAMES" for kind in AUTO_CLASSES] + ["MODEL_MAPPING_NAMES"]
    for mapping in mappings:
        found = getattr(modeling_auto, mapping, {}).get(config.model_type)
        names += [found] if isinstance(found, str) else list(found or ())
    classes = [getattr(transformers, name, None) for name in dict.fromkeys(names)]
    for found in [*classes, *_classes_for(config)]:
        if inspect.isclass(found) and issubclass(found, nn.Module) and hasattr(found, "_from_config"):
            yield found


def _classes_for(config: object) -> Iterator[type]:
    """Yield the classes beside a config that take it: parts of composite models have no auto class."""
    name = type(config).__module__.replace("configuration_", "modeling_")
    try:
        module = importlib.import_module(name)
    except ImportError:
        return
    own = (found for found in vars(module).values() if inspect.isclass(found) and found.__module__ == name)
    yield from (found for found in own if getattr(found, "config_class", None) is type(config))


def build(config: Any, model_class: Any, sizes: Sizes) -> Any:
    """A random model of the shrunk config in which every bias and gain matters."""

    def make() -> Any:  # of a new config each time: models write into theirs
        return model_class._from_config(
            type(config).from_dict(shrink(config.to_dict(), sizes)), attn_implementation="eager"
        )

    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in make().parameters())
    if num_parameters > MOST_PARAMETERS:
        raise Refusal("expected a model that can be made small, got one whose sizes its config does not show")
    torch.manual_seed(0)
    return shake(make().eval().float())


def shake(model: nn.Module) -> nn.Module:
    """Random weights, large enough to tell keys apart; no bias or gain is left trivial."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Gains of 1 and biases of 0 would be proven wherever a row puts them, or leaves them out.
            if parameter.dim() > 1:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.3 * noise)
    return model


def offered_inputs(model: Any) -> Iterator[dict[str, Tensor]]:
    """Inputs worth trying, the likeliest first: text, then images, then sound as frames or as a wave."""
    generator, config = torch.Generator().manual_seed(1), model.config
    stated = getattr(getattr(config, "text_config", config), "vocab_size", None)
    num_words = min(VOCABULARY // 2, stated) if isinstance(stated, int) and stated > 5 else VOCABULARY // 2

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def ids(name: str) -> dict[str, Tensor]:
        return {name: torch.randint(min(5, num_words - 1), num_words, (BATCH, NUM_TOKENS), generator=generator)}

    text, decoder = ids("input_ids"), ids("decoder_input_ids")
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", 32)
    size = size if isinstance(size, int) else 32
    pixels = {"pixel_values": numbers(BATCH, getattr(config, "num_channels", 3) or 3, size, size)}
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", None) or 16
    frames = min(2 * (getattr(config, "max_source_positions", None) or 32), 3000)
    sound = {"input_features": numbers(BATCH, bins, frames)}
    across, wave = {"input_features": numbers(BATCH, 48, bins)}, {"input_values": numbers(BATCH, 4000)}
    accepted = set(inspect.signature(model.forward).parameters)
    alone = (text | decoder, text, text | pixels, pixels)
    heard = (part | more for part in (sound, across, wave) for more in (decoder, {}))
    yield from (offered for offered in (*alone, *heard) if set(offered) <= accepted)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Without transformers' own warnings: a twin's config is unusual by design."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.set_verbosity(level)


def _attempts(config: Any) -> list[Sizes]:
    """The sizes worth a try: those that make another config than the ones before."""
    small = [shrink(config.to_dict(), sizes) for sizes in ATTEMPTS]
    return [sizes for number, sizes in enumerate(ATTEMPTS) if small[number] not in small[:number]]


def run_twin(config: Any) -> Evidence:
    """Run the first twin that can be built once, and observe that pass."""
    failures: list[str] = []
    start = time.process_time()
    with without_warnings():
        for model_class, sizes in itertools.product(model_classes(config), _attempts(config)):
            if time.process_time() - start > MOST_SECONDS:
                break
            if failures and failures[-1].startswith(model_class.__name__) and any(w in failures[-1] for w in HOPELESS):
                continue
            try:
                model = build(config, model_class, sizes)
            except Exception as reason:  # whatever transformers raises: the next sizes may do
                failures.append(f"{model_class.__name__} could not be built: {error_line(reason)}")
                continue
            for inputs in offered_inputs(model):
                try:
                    with torch.no_grad():
                        return Evidence(model, observe_twin(model, inputs, offered_inputs))
                except Exception as reason:
                    failures.append(f"{model_class.__name__} on {'+'.join(inputs)}: {error_line(reason)}")
    raise Refusal(failures[0] if failures else "expected a model class in transformers, got none")


def error_line(reason: BaseException) -> str:
    """Return the first line of an error, or of its cause where it ends in a colon (config checks name themselves)."""
    line = f"{type(reason).__name__}: {reason}".splitlines()[0]
    return error_line(reason.__cause__) if line.endswith(":") and reason.__cause__ else line[:160]


def observe_twin(model: nn.Module, inputs: Mapping[str, Tensor], offers: Offers = lambda part: ()) -> ObservedPass:
    """One pass of the model, watched; then one of each model inside it that has not run, such as an image tower."""
    seen = ObservedPass(model, len(next(iter(inputs.values()))))

    def follow_both(*done: Any) -> None:
        follow(*done)
        seen.follow(*done)

    with (
        seen.hooked(model),
        seen.finder.recording() as follow,
        Interception(seen.see, written_out=True, follow=follow_both),
    ):
        model(**inputs)
        for name, part in model.named_modules():
            if name and hasattr(part, "main_input_name") and not _has_run(name, seen):
                _run_alone(part, offers(part), seen)
    return seen


def _has_run(name: str, seen: ObservedPass) -> bool:
    return any(calls and (other == name or other.startswith(f"{name}.")) for other, calls in seen.inputs.items())


def _run_alone(part: nn.Module, offers: Iterable[Mapping[str, Tensor]], seen: ObservedPass) -> None:
    """The first inputs that it takes; what a failed try has left is taken back."""
    for inputs in offers:
        num_calls, known = len(seen.calls), {name: len(calls) for name, calls in seen.inputs.items()}
        try:
            part(**inputs)
            return
        except Exception:
            del seen.calls[num_calls:]
            for record in (seen.inputs, seen.outputs):
                for name, calls in record.items():
                    del calls[known.get(name, 0) :]
