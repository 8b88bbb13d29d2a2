"""Live models: the heads of an `nn.Module` as views of its parameters, so that gradients flow through them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from ...errors import Refusal, refusal
from ..config import Config
from ..coverage import BY_TABLE, Coverage
from ..model import Model, open_model
from ..module import AttentionModule, module_of_row
from ..neighbours import Surroundings
from ..reader import read_heads
from ..registry import is_in_tables
from ..schema import Family
from ..tensors import Once
from .changes import active_modes, changes
from .discover import discover
from .modules import Explicit, describe_modules, explicit_row, known_modules
from .tensors import ModuleTensors, named_modules, settings
from .trial import Trial
from .watch import Sample

__all__ = ["LiveModel", "is_known", "open_live", "settings"]

OF_FILES = ("auto_map", "architectures")  # whose word on its code is not needed where the code itself is there
MOST_NAMED = 3  # of what differs in a model
AS_NAMED = "as named, without positions, norms and mask, not run"
BY_KINDS = "by the kinds of its modules, not run"


@dataclass(frozen=True)
class LiveModel:
    """A live model opened: its attention modules, by what they were read, and what the pass over a sample has shown."""

    module: nn.Module
    family: str
    sites: tuple[AttentionModule, ...]
    read: Coverage  # by names and settings alone
    tensors: ModuleTensors
    config: Config = field(default_factory=Config)
    model: Model | None = None  # of the tables, where these were used
    trial: Trial | None = None
    is_proven: bool = False  # found in a pass, by its calls

    @property
    def num_layers(self) -> int:
        if self.model is not None:
            return self.model.num_layers
        return max((site.number for site in self.sites), default=-1) + 1

    def layers(self) -> Iterator[AttentionModule]:
        """Every attention module with its heads, as views: what they say changes with the parameters."""
        return map(read_heads, self.sites)

    def coverage(self) -> Coverage:
        """Proven where a pass over a sample has shown it; else with what differs from the code and the config."""
        if self.is_proven:
            return self.read.without(active_modes())
        found = self.read if self.trial is None else self.trial.coverage(self.read, self.sites)
        further = self._changes() if self.trial is None or found.basis else []
        return found.without([*further, *active_modes()])

    def _changes(self) -> list[str]:
        around = Surroundings.of(self.model.modules() if self.model is not None else ())
        found = changes(self.module, {site.owner for site in self.sites}, around.modules)
        further = len(found) - MOST_NAMED
        return found if further <= 0 else [*found[:MOST_NAMED], f"and {further} more that differ"]


def is_known(model: nn.Module) -> bool:
    """Tell whether the heads can be found without a pass; a refusal by a family's table is known too."""
    try:
        return bool(open_live(model).sites)
    except Refusal:
        return is_in_tables(str(settings(model).get("model_type")))


def open_live(
    model: nn.Module,
    *,
    family: Family | None = None,
    heads: Sequence[Explicit] = (),
    sample: Sample | None = None,
    tensors: ModuleTensors | None = None,
) -> LiveModel:
    """Locate the attention of a live model; fails, naming what looks like attention, where nothing is known.

    A model whose config names a known family is read by that family's table; run once on `sample`, a batch as it takes
    them, its heads must give the logits of its calls. Any other is run on the sample, and its heads are found by what
    its attention kernels are given. Without a sample it is searched for torch's and timm's attention modules, whose
    causality cannot be seen from outside: only `nn.TransformerDecoderLayer` is taken to be causal. Or name the
    projections, one entry per layer: `heads=[(query, key, num_heads, num_key_heads), …]` or
    `heads=[(fused, num_heads, num_key_heads), …]`. `tensors` replaces what is read of the model.
    """
    tensors, config = tensors or ModuleTensors(model), Config(settings(model))
    modules = named_modules(tensors.model)
    is_known = family is not None or is_in_tables(str(config.get("model_type")))
    if heads:
        named = [module_of_row(explicit_row(entry, modules), tensors) for entry in heads]
        opened = _number(model, named, tensors, AS_NAMED)
    elif is_known or (sample is None and config.get("model_type") is not None):
        opened = _read_family(model, tensors, config, family)
    elif sample is not None:
        return replace(_number(model, discover(model, sample, tensors), tensors, ""), is_proven=True)
    else:
        opened = _number(model, list(known_modules(modules, tensors)), tensors, BY_KINDS)
    if not opened.sites:
        raise _unknown(tensors, config)
    if sample is None:
        return opened
    trial = Trial(tensors, opened.sites).over(sample)
    return replace(opened, sites=tuple(trial.judged()), trial=trial)


def _unknown(tensors: ModuleTensors, config: Config) -> Refusal:
    kind = f"{type(tensors.model).__name__} of model type {config.get('model_type')!r}"
    return refusal(
        "a live model of a known family or with known modules", kind, describe_modules(named_modules(tensors.model))
    )


def _read_family(module: nn.Module, tensors: ModuleTensors, config: Config, family: Family | None) -> LiveModel:
    try:
        stored = {key: value for key, value in config.values.items() if key not in OF_FILES}
        model = open_model(Config(stored), tensors, family=family)
    except Refusal:
        if family is not None or is_in_tables(str(config.get("model_type"))):
            raise
        raise _unknown(tensors, config) from None
    basis = model.coverage.basis or BY_TABLE
    read = replace(model.coverage, basis=basis)
    # What layers share is read anew each time: weights change, and adapters compute theirs.
    own = (one.tensors.tensors if isinstance(one.tensors, Once) else one.tensors for one in model.modules())
    found = tuple(replace(one, tensors=part) for one, part in zip(model.modules(), own, strict=True))
    return LiveModel(module, model.family, found, read, tensors, config, model)


def _number(module: nn.Module, found: Sequence[AttentionModule], tensors: ModuleTensors, basis: str) -> LiveModel:
    """Number the modules within their block, in the order found."""
    numbers: Counter[str] = Counter()
    numbered = []
    for one in found:
        numbered.append(replace(one, number=numbers[one.block]))
        numbers[one.block] += 1
    refused = [one.query_name for one in found if one.reason is not None]
    reasons = (f"without {', '.join(refused)}",) if refused else ()
    read = Coverage(len(found) - len(refused), len(found), "modules", reasons, basis)
    return LiveModel(module, "modules", tuple(numbered), read, tensors)
