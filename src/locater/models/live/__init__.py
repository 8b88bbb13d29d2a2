"""Live models: the heads of an `nn.Module` as views of its parameters, so that gradients flow through them."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from ...attention.calls import AttentionCall
from ...errors import Refusal, refusal
from ..config import Config
from ..coverage import BY_TABLE, Coverage, spans
from ..model import Model, open_model
from ..module import AttentionModule, module_of_row, refused_module
from ..neighbours import Surroundings
from ..reader import read_heads
from ..registry import is_in_tables
from ..schema import Attention, Family
from ..tensors import Once
from .changes import active_modes, changes
from .discover import Finder, difference, discover, is_normed
from .modules import Explicit, describe_modules, explicit_row, known_modules
from .tensors import ModuleTensors, named_modules, settings
from .watch import Product, Sample

__all__ = ["LiveModel", "is_known", "open_live", "settings"]

OF_FILES = ("auto_map", "architectures")  # whose word on its code is not needed where the code itself is there
MOST_NAMED = 3  # of what differs in a model
AS_NAMED = (
    "as named, without positions, norms and mask, not run; what is done to queries after the projection is not in η"
)
BY_KINDS = "by the kinds of its modules, not run"


def _masked_otherwise(sites: Iterable[AttentionModule]) -> list[str]:
    """Name the first of the modules whose call was masked as no head says."""
    names = [f"`{site.query_name}` {site.otherwise}" for site in sites if site.otherwise is not None]
    return [names[0] + (f", and {len(names) - 1} more" if len(names) > 1 else "")] if names else []


class Trial:
    """One pass over a sample: do the heads that were read of a model give the logits of its own calls?

    Told of every call by the pass's interception. Where they do not, the call itself is explained, as for an unknown
    model, and the result takes their place.
    """

    def __init__(self, tensors: ModuleTensors, sites: Sequence[AttentionModule]) -> None:
        self.sites, self.finder = sites, Finder(tensors)
        self.ran: set[int] = set()  # numbers of sites
        self.differing: dict[int, str] = {}  # by number, in words
        self.instead: dict[int, AttentionModule] = {}  # by number, what the call itself shows
        self.further: list[str] = []  # modules whose attention is none of these sites'
        self.by_names: dict[tuple[str, str], list[int]] = defaultdict(list)
        for index, site in enumerate(self.sites):
            self.by_names[site.query_name, site.key_name].append(index)
        self.num_calls: Counter[tuple[str, str]] = Counter()

    def over(self, sample: Sample) -> "Trial":
        self.finder.run(sample, self.see)
        return self

    def see(self, call: AttentionCall) -> None:
        if not self.finder.may_be_attention(call):
            return
        products = {product.name: product for product in self.finder.watch.products}
        names = next((names for names in self.by_names if names[0] in products and names[1] in products), None)
        if names is None:
            self.further.append(self.finder.name_of(call))
        else:  # layers may share projections (ALBERT): by names alone, all calls would be held against the first one
            indices, number = self.by_names[names], self.num_calls[names]
            self.num_calls[names] += 1
            self._judge(indices[number % len(indices)], call, (products[names[0]], products[names[1]]))
        self.finder.watch.next_call()

    def _judge(self, index: int, call: AttentionCall, products: tuple[Product, Product]) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            try:
                words = self._difference(read_heads(self.sites[index]), call, products)
            except (Refusal, RuntimeError) as reason:
                words = f"it could not be compared: {reason}"
        self.ran.add(index)
        if words is not None and index not in self.differing:
            self.differing[index], self.instead[index] = words, self.finder.explained(call)

    def _difference(self, layer: AttentionModule, call: AttentionCall, products: tuple[Product, Product]) -> str | None:
        if layer.refused:
            return layer.refused[0]
        words = difference(layer.heads, products[0].x, products[1].x, call)
        if words is not None:
            return words
        for side, product in (("query", products[0]), ("key", products[1])):
            norm = getattr(layer.heads[0], side).input_norm
            normed = (one.x for one in reversed(self.finder.watch.norms) if one.x.shape == product.x.shape)
            if norm is not None and not any(is_normed(norm, before, product.x) for before in normed):
                return f"what `{product.name}` is given does not come from its input norm"
        return None

    def judged(self) -> list[AttentionModule]:
        """The sites, with those that differ replaced by what the call shows, or refused."""
        return [self._replaced(index) if index in self.instead else site for index, site in enumerate(self.sites)]

    def _replaced(self, index: int) -> AttentionModule:
        site, instead = self.sites[index], self.instead[index]
        names = site.query_name, site.key_name
        if instead.reason is None and (instead.query_name, instead.key_name, instead.block) == (*names, site.block):
            return replace(instead, number=site.number)
        why = instead.reason or f"its call is of {instead.block} attention by `{instead.query_name}`"
        reason = f"not as its config says ({self.differing[index]}); {why}"
        return refused_module(site.block, names, reason, number=site.number)

    def coverage(self, before: Coverage, judged: Sequence[AttentionModule]) -> Coverage:
        """Update the coverage by the pass: proven where it ran, with the differences that it showed."""
        lost = [index for index in sorted(self.differing) if not judged[index].num_heads]
        found = [index for index in sorted(self.differing) if judged[index].num_heads]
        idle = [index for index in range(len(self.sites)) if index not in self.ran]
        reasons = [f"{self._named(lost)}: {self.differing[lost[0]]}"] if lost else []
        reasons += _masked_otherwise(judged[index] for index in found)
        reasons += [f"the attention of `{self.further[0]}`, which no row names"] if self.further else []
        remarks = [] if idle else ["run on the sample"]
        if found:
            remarks.append(f"{self._named(found)} as run, not as the config says ({self.differing[found[0]]})")
        basis = f"{before.basis} in {self._named(idle)}" if idle and self.ran else before.basis if idle else ""
        reasons, remarks = (*before.reasons, *reasons), (*before.remarks, *remarks)
        return replace(before, num_read=before.num_read - len(lost), basis=basis, reasons=reasons, remarks=remarks)

    def _named(self, indices: Sequence[int]) -> str:
        """Sites by block and numbers."""
        blocks: dict[str, list[int]] = defaultdict(list)
        for site in (self.sites[index] for index in indices):
            blocks[site.block].append(site.number)
        return ", ".join(f"{block} layers {spans(sorted(numbers))}" for block, numbers in blocks.items())


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
        further = self.changes() if self.trial is None or found.basis else []
        return found.without([*further, *active_modes()])

    def changes(self) -> list[str]:
        """Describe what differs from the code and the config, found without running it."""
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
        named = [module_of_row(_held(explicit_row(entry, modules), tensors), tensors) for entry in heads]
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


def _held(row: Attention, tensors: ModuleTensors) -> Attention:
    """Return a row that names parameters; refuse a weight that a hook makes, as of `torch.nn.utils.prune`."""
    for name in (row.query, row.key):
        if not {f"{name}.weight", f"{name}_weight"} & tensors.names:
            raise refusal(f"a parameter `{name}.weight`, or a parametrised one", "a weight that a hook computes")
    return row


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
    reasons = [f"without {', '.join(refused)}"] if refused else []
    reasons += _masked_otherwise(found)
    read = Coverage(len(found) - len(refused), len(found), "modules", tuple(reasons), basis)
    return LiveModel(module, "modules", tuple(numbered), read, tensors)
