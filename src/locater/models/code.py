"""Code beside a stored model: what its config names that is not the code which the tables were held against."""

import importlib.util
import re
from collections.abc import Iterator, Mapping

from .schema import Config, Family

# How names of transformers' classes end behind the model's own.
TASKS = re.compile(
    r"(encoder|decoder|text|vision)?(model|modelwithprojection|preformodel|lmheadmodel|withlmheadmodel|lmmodel|mtmodel"
    r"|doubleheadsmodel|encodermodel|for(causallm|maskedlm|pretraining|sequenceclassification|tokenclassification"
    r"|questionanswering|multiplechoice|nextsentenceprediction|conditionalgeneration|imageclassification|ctc"
    r"|audioclassification|imageclassificationwithteacher|maskedimagemodeling|textencoding))"
)
PARTS = re.compile(r"_(text|vision)?(_model)?$")
SHORT = {"refinedweb": "rw", "refinedwebmodel": "rw", "openaigpt": "openaigpt"}


def foreign_code(config: Config, family: Family) -> Iterator[str]:
    """In words: a model's own code (`auto_map`), and classes that are not of its declared type."""
    auto_map = config.get("auto_map")
    if isinstance(auto_map, Mapping) and auto_map:
        named = sorted(str(value) for key, value in auto_map.items() if "AutoConfig" not in str(key))
        yield f"its own code was not looked at (auto_map: {', '.join(named or ['a config'])[:120]})"
        return
    model_type, named = config.get("model_type"), config.get("architectures")
    for name in named if isinstance(named, list) and isinstance(model_type, str) else ():
        if isinstance(name, str) and not _is_of_type(name, model_type) and not _is_in_transformers(name, family):
            yield f"the class {name[:80]} is not known for the type {model_type[:80]}, and was not looked at"


def _is_of_type(name: str, model_type: str) -> bool:
    """By its name alone: the type, without _text and the like, then a task.

    >>> _is_of_type("Gemma3ForCausalLM", "gemma3_text"), _is_of_type("LlamaEncoderModelOfMine", "llama")
    (True, False)
    """
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    for kind in (model_type, PARTS.sub("", model_type)):
        start = re.sub(r"[^a-z0-9]", "", kind.lower())
        start = SHORT.get(start, start)
        if plain.startswith(start) and TASKS.fullmatch(plain[len(start) :]):
            return True
    return False


def _is_in_transformers(name: str, family: Family) -> bool:
    """Tell whether an installed transformers has the class, for a type that the family's rows are for."""
    if not name.isidentifier() or importlib.util.find_spec("transformers") is None:
        return False
    import transformers

    kind = getattr(getattr(transformers, name, None), "config_class", None)
    return getattr(kind, "model_type", None) in family.model_types
