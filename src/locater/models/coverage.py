"""Coverage of a scan: the one definition of COMPLETE, and all that keeps a model from it.

COMPLETE means that every tensor and setting that can change a logit was read and used, and that nothing else in the
module acts. Otherwise it says what differs or is left out (PARTIAL), or by what the heads were read without
being run (`by the table, not run`).
"""

import contextlib
import importlib.util
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from ..errors import Refusal
from .config import Asked, Cell, Config, ask, resolve
from .module import AttentionModule, Stack
from .neighbours import (
    Surroundings,
    asked_for,
    listed_entries,
    lost_norm,
    misplaced_bias,
    missing_layers,
    outer_modules,
    uneven_layers,
    unknown_neighbours,
    unread_queries,
)
from .schema import Attention, BucketsAt, Family, LowRankAt, NormAt, RotaryAt
from .slices import rotary

BY_TABLE, BY_LAYOUT = "by the table, not run", "by the layout, not run"


@dataclass(frozen=True)
class Coverage:
    """`reasons` say what is left out or differs; `basis` by what the heads were read, where nothing has proven them."""

    num_read: int
    num_all: int
    what: str = "layers"
    reasons: tuple[str, ...] = ()
    basis: str = ""
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The line that a scan shows.

        >>> str(Coverage(2, 2)), str(Coverage(2, 2, basis=BY_TABLE)), str(Coverage(1, 2, reasons=("no keys in 1",)))
        ('COMPLETE', 'by the table, not run', 'PARTIAL: 1 of 2 layers, no keys in 1')
        """
        if not self.reasons:
            return ", ".join([self.basis or "COMPLETE", *self.remarks])
        read = f"PARTIAL: {self.num_read} of {self.num_all} {self.what}"
        return ", ".join([read, *self.reasons, *([self.basis] if self.basis else []), *self.remarks])

    @property
    def is_complete(self) -> bool:
        return not self.reasons and not self.basis

    def without(self, reasons: Iterable[str]) -> "Coverage":
        """The same with further reasons why it is not complete."""
        return replace(self, reasons=(*self.reasons, *reasons))


def coverage_of(family: Family, config: Config, stacks: tuple[Stack, ...], *, proven: Config | None = None) -> Coverage:
    """Compute coverage of tensors and settings by a family's rows: what is stored against what the rows read.

    `proven`: the config with all defaults of a twin that has all settings, so that none of them can be unread.
    """
    partial = ask(family.partial, proven or config) if family.partial else None
    reasons = [
        words.format(f"{stack[0].block} layers {spans(numbers)}")
        for stack in stacks
        for words, numbers in missing_layers(stack).items()
        if numbers
    ]
    reasons += [partial] if partial else []
    checks = (misplaced_bias, lost_norm) if family.model_types else ()  # rows of known code say which biases there are
    reasons += [reason for stack in stacks for check in (uneven_layers, *checks) if (reason := check(stack))]
    if not partial:
        around, tensors = Surroundings.of(module for stack in stacks for module in stack), stacks[0][0].tensors
        reasons += _first("not in the heads", unknown_neighbours(around, tensors, family))
        unread = unread_queries(around, tensors.names)
        reasons += (
            [f"{len(unread)} further tensors that look like queries, such as `{unread[0][:120]}`"] if unread else []
        )
    reasons += [] if proven else _first("not read in the config", unread_settings(family, config, stacks))
    reasons += foreign_code(config, family)
    num_read, num_all = sum(map(len, stacks)), sum(stack[0].num_layers for stack in stacks)
    return Coverage(num_read, num_all, reasons=tuple(reasons))


def _first(what: str, names: list[str]) -> list[str]:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [f"{what}: `{names[0][:120]}`{more}"] if names else []


def spans(numbers: Iterable[int]) -> str:
    """Whole numbers as a reader would list them.

    >>> spans([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


# ----------------------------------------------------------- settings that no cell of a row asks for, telling by name
# Words that mean a term of the logits, or what stands before them.
TELLING = re.compile(
    r"rope|rotary|alibi|soft_?cap|(^|_)qk_|qkv|attn|attention|window|sliding|temperature|relative|sink|clip_|theta"
    r"|scale_logits|query_pre|causal|norm_type|norm_first|softmax|sdpa|bidirectional|(^|_)ntk|mscale|yarn|dilat|head_scale"
    r"|^[qk]_|(^|_)(qk|query|key)_|_qk$|pos(ition)?_?(enc|emb|scale|bias)|logits?_(temp|cap|scale|multi)|score_func"
    r"|shared?_kv|kv_share|cosine_att|^per_layer_config$|(^|_)log_?n(_|$)|logn|length_scal|differential|token_shift|hadamard"
    r"|quarot|spinquant|^rotate|cross_layer|cla_factor|mixture_of_heads|pos_type|max_logit|tanh_cap|(^|_)mup(_|$)"
    r"|normali[sz]ation$|norm_kind|ln_type|layernorm_type|plus_one|zero_cent|use_(rms_?norm|ln$|layer_?norm)|^(pre|post)_?norm$"
    r"|embedding_norm|hidden_norm|mup|^norm(_class_name|_kind)?$|kv_heads?$|prefix_lm|pos_emb"
)
OFF = re.compile(r"(use_)?(rope|rotary)$|causal")  # switches whose false says as much as another's true
# Names with such words that say nothing of a logit, or repeat what tensors show.
HARMLESS = re.compile(
    r"drop|implementation|init|num_.*heads|n_head|head_dim|max_position|max_relative|(?<!alibi_)bias$|output_attentions|return_"
    r"|cross_attention|checkpoint|kernel|flash|_cache|loss|mask_token|attention_types$|final_logit|^logit_scale$"
    r"|_in_fp32$|contrastive|attention_out_multiplier|num_buckets|parallel_attn|attn_layer_(offset|period)|sliding_window_pattern$"
    r"|max_window_layers|every_n_layers|no_rope_layer_interval|conv_pos|learned_pos_emb|sinusoidal_pos|tdnn|(key|value)_length$"
)

NOTHING = (None, False, 0, "", "none", "default", "absolute", [], {})
# Read where codes become numbers, or words of the user that nothing reads.
READ_ELSEWHERE = ("quantization_config", "quantization", "id2label", "label2id", "task_specific_params")
UNDIVIDED = ("per_layer_config",)  # a table that says anything of a layer


def unread_settings(family: Family, config: Config, stacks: Sequence[Stack]) -> list[str]:
    """The entries of a config that may change a logit, nested ones by their path, and that no row asks for."""
    asked = asked_by_rows(family, config, stacks)
    # The entries of a GGUF file are translated, some to several spellings, so that no type's own code lists them.
    is_translated = getattr(stacks[0][0].tensors, "format", "") == "gguf"
    listed = None if is_translated else listed_entries(family)
    # An entry counts as asked for where a table around it was taken whole.
    paths = {*telling(config.values, listed), *_other_sizes(config, stacks)}
    return sorted(path for path in paths if asked.isdisjoint({path, *outer_modules(path)}))


def asked_by_rows(family: Family, config: Config, stacks: Sequence[Stack]) -> set[str]:
    """The entries that a family's rows look for in this config, whether they are there or not."""
    asked = set(family.initial)
    listening = Config(Asked(config.values, asked))
    if family.partial is not None:
        ask(family.partial, listening)
    for module in (module for stack in stacks for module in stack):
        _ask_all(replace(module, config=listening.within(module.row.config)))
    if any(stack[0].row.rotary is not None for stack in stacks):  # read where a layer turns at all
        asked |= {"rope_parameters", "rope_scaling", "rope_theta"}
    return asked


def _other_sizes(config: Config, stacks: Sequence[Stack]) -> Iterator[str]:
    """Yield `head_dim` where heads that turn have another size: transformers takes the turning rows from it alone."""
    for module in (stack[0] for stack in stacks if stack[0].row.rotary is not None):
        path = ".".join(filter(None, (module.row.config, "head_dim")))
        if config.get(path) not in (None, module.shape.d_head):
            yield path


def telling(values: Mapping[str, Any], listed: Collection[str] | None = None, path: str = "") -> Iterator[str]:
    """Yield entries, nested ones by their path, that may change a logit: by their names, or as some row asks for them.

    `listed`: those of the type's own code, which are known not to; None where none of it is known.
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and key not in UNDIVIDED:
            yield from telling(value, listed, f"{path}{key}.") if key not in READ_ELSEWHERE else ()
        elif key in (listed or ()) or (value in NOTHING and not (value is False and OFF.search(str(key)))):
            continue
        elif tells(str(key)) or (listed is not None and key in asked_for()):
            yield f"{path}{key}"


def tells(name: str) -> bool:
    return TELLING.search(name) is not None and not HARMLESS.search(name)


def _ask_all(module: AttentionModule) -> None:
    """Every cell of a row; what refuses does so again when it is read."""
    for column in fields(Attention):
        _ask_cell(module, getattr(module.row, column.name), column.name)
    with contextlib.suppress(Refusal):
        rotary(module)


def _ask_cell(module: AttentionModule, cell: Any, name: str) -> None:
    """Resolve one cell and those of the row within it, so that the entries they read count as asked for."""
    try:
        if name == "alibi":
            cell = None if cell is None else ask(cell, module.config, 0)
        elif callable(cell):
            cell = ask(cell, module.config, module.number)
        elif isinstance(cell, str) and name in CELLS:
            cell = resolve(cell, module.config, module.number)
    except Refusal:
        return
    if is_dataclass(cell) and not isinstance(cell, type):
        for column in fields(cell):
            _ask_cell(module, getattr(cell, column.name), column.name)


# The columns whose words name entries of the config.
CELLS = {
    column.name
    for kind in (Attention, NormAt, RotaryAt, BucketsAt, LowRankAt)
    for column in fields(kind)
    if column.type == Cell
}


# ------------------------------------------------------ a model's own code, which is not what the tables were held to
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
