"""Observations of every layer since the last report: calls of kernels, or inputs of modules."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ..attention import observe, sample_queries
from ..attention.arguments import read_arguments
from ..attention.call_statistics import is_shifted, statistics_of_call
from ..attention.calls import AttentionCall
from ..attention.kernels import packed
from ..errors import Refusal, missing, refusal
from ..head import Block
from ..models import AttentionModule, read_heads, read_layout, spans
from ..models.live import LiveModel, open_live
from ..models.live.tensors import WholeTensors, named_modules, unwrap
from ..models.sources import Live
from .finding import FoundHeads
from .inputs import ModuleInputs, WatchedPass, fitting, is_packed, padding, read_padding
from .places import (
    RENAMED,
    Agreement,
    discovered,
    has_others,
    module_name,
    repeated,
    silent_modules,
    whole_call,
    written_out,
)
from .report import MODULE_INPUTS, LayerReport
from .tally import MODES, LogitBudget, Mode, Scope, Tally, merge_tallies

Key = tuple[int, Mode]  # a site's index, and what the pass was for


class Observation:
    """Told of every pass by the hooks; `tallies` hold the sums, one per layer and mode.

    `sites` are the layers of a model that is known; of any other they are found by their calls, in the order of these,
    and their heads by what came before, on a sample or in the first pass that is watched.
    """

    def __init__(
        self, live: Live, scope: Scope, is_due: Callable[[], bool], group: dist.ProcessGroup | None = None
    ) -> None:
        self.live, self.scope, self.is_due, self.group = live, scope, is_due, group
        self.model = unwrap(live.module)
        self.head_numbers = None if scope.head_numbers is None else tuple(sorted(set(scope.head_numbers)))
        self.layers = None if scope.layers is None else frozenset(scope.layers)
        self.modules = named_modules(self.model)
        self.is_known = True
        self.opened: LiveModel | None = None
        self.changes: list[str] | None = None  # of the model, from the code and config by which it is read
        self.left_out: list[str] = []  # reasons why layers that were found cannot be read
        self.sites = self._find_sites()
        self.found = FoundHeads(live.module, live.sample, is_wanted=not self.is_known and scope.weights)
        self.generator = torch.Generator().manual_seed(0)
        self.lock = threading.Lock()  # passes of several threads add to one tally
        self.agreement = Agreement(self.modules, group)
        self.begin()

    def begin(self) -> None:
        """Nothing seen yet."""
        self.tallies: dict[Key, Tally] = {}
        for index in range(len(self.sites)):
            self._add_tallies(index)
        self.spending = LogitBudget(self.scope.budget, len(self.sites))
        self.refused = set(self.left_out)
        self.through: dict[int, str] = {}
        self.calling: set[str] = set()  # modules whose calls were seen, where nothing else is known
        self.softmaxes: set[str] = set()  # modules that compute a softmax themselves, where nothing else is known
        self.shown: set[str] = set()  # stabilisers that calls have shown

    def _find_sites(self) -> list[AttentionModule]:
        model, heads = self.live.module, self.live.heads
        family = None if self.live.layout is None else read_layout(self.live.layout)
        try:
            opened = open_live(model, family=family, heads=heads, tensors=WholeTensors(model))
            self.opened, found = opened, opened.sites
            known = [site for site in found if self._is_wanted(site)]
        except Refusal:
            if heads or family is not None:
                raise
            self.is_known = False
            return []
        self.left_out = [reason for site in found if not site.num_heads for reason in read_heads(site).refused]
        if not known and self.left_out:
            raise Refusal(self.left_out[0])
        if not known:
            numbers = spans(sorted({site.number for site in found}))
            raise missing(f"layers among {numbers} with the heads asked for")
        return known

    def written_out(self, call: AttentionCall) -> None:
        """A softmax in a model of which nothing is known: perhaps attention, but of which queries and keys?"""
        name = module_name(call, self.modules)
        if name is not None and call.logits is not None and call.logits.dim() == 4 and min(call.logits.shape[-2:]) > 1:
            self.softmaxes.add(name)

    def further(self, call: AttentionCall) -> None:
        """A kernel's call in none of the layers that are known; said, unless layers were chosen or left out."""
        name = module_name(call, self.modules)
        if name is not None and self.layers is None and not self.left_out:
            self.refused.add(f"the attention of `{name}` is of no layer that was read: not looked at")

    def _is_wanted(self, site: AttentionModule) -> bool:
        return (self.layers is None or site.number in self.layers) and bool(self.indices(site))

    def indices(self, site: AttentionModule) -> tuple[int, ...]:
        every = range(site.num_heads)
        return tuple(every if self.head_numbers is None else (head for head in self.head_numbers if head in every))

    def by_call(
        self, site: AttentionModule | None, call: AttentionCall, inputs: ModuleInputs | None, run: WatchedPass
    ) -> bool:
        """One call of a kernel; False where it is not this layer's attention. What cannot be read is noted."""
        with self.lock:
            try:
                return call.is_empty or self._by_call(site, call, inputs, run)
            except Exception as reason:  # whatever it is, to be watched must not end a run
                if call.logits is None:
                    name = (site and site.query_name) or module_name(call, self.modules)
                    self.refused.add(f"a call of {call.through} in `{name}` could not be read: {reason}")
                return False

    def _by_call(
        self, site: AttentionModule | None, call: AttentionCall, inputs: ModuleInputs | None, run: WatchedPass
    ) -> bool:
        call = packed(call)
        if site is None and (site := self._discover(call, run)) is None:
            return False
        call = whole_call(call, site, self.modules)
        num_texts, num_heads, num_queries, num_keys = read_arguments(call, site.num_heads).shape
        if call.logits is not None and not (num_heads == site.num_heads and _fits(call.logits, inputs)):
            return False
        if num_heads != site.num_heads:
            raise refusal(f"{site.num_heads} heads", num_heads)
        key: Key = self.sites.index(site), run.mode
        indices = self.indices(site)
        window = call.window[0], 0 if call.is_causal else call.window[1]
        sample = self._sample(key, (num_texts, len(indices), num_queries, num_keys), window, call.query.device)
        if sample is not None and not len(sample):
            return True
        query_valid = fitting(padding(run.given, site.block)[0], num_texts, num_queries)
        statistics = statistics_of_call(
            call, num_heads=site.num_heads, heads=None if len(indices) == num_heads else indices, sample=sample,
            query_valid=query_valid, near=self.scope.near, blocks=self.scope.blocks,
        )  # fmt: skip
        is_plain = not (run.has_cached_keys and not self.model.training) and not is_packed(run.given)
        if self.is_known and is_plain:
            self.found.check(site, call, inputs)
        self.shown |= {"SoftCap"} if call.softcap is not None else set()
        x = call.x if inputs is None or inputs.x_query is None else inputs.x_query
        self.through[key[0]] = call.through
        self.tallies[key].add(statistics, num_there=num_texts * num_queries, x=x, valid=query_valid)
        return True

    def by_inputs(self, site: AttentionModule, inputs: ModuleInputs, run: WatchedPass) -> None:
        """One run of an attention module that called no kernel. What cannot be read is noted, never raised."""
        with self.lock:
            try:
                self._by_inputs(site, inputs, run)
            except Exception as reason:  # whatever it is, to be watched must not end a run
                self.refused.add(f"what `{site.query_name}` was given could not be read: {reason}")

    def _by_inputs(self, site: AttentionModule, inputs: ModuleInputs, run: WatchedPass) -> None:
        indices, causal = self.indices(site), self.live.causal
        if self.live.heads and causal is None:
            self.refused.add(
                f"layer {site.number} (`{site.query_name}`) calls no attention kernel, so whether it looks ahead "
                "cannot be known: say causal=True or causal=False"
            )
            return
        try:
            layer = read_heads(site)
        except Refusal as reason:
            self.refused.add(str(reason))
            return
        if self.changes is None:  # no call will prove heads that the user did not describe
            is_told = self.opened is None or self.live.heads or self.live.layout
            self.changes = [] if is_told or self.opened is None else self.opened.changes()
        if self.changes:
            self.refused.add(f"`{site.query_name}` calls no kernel, and is not reconstructed: {self.changes[0]}")
            return
        heads = [head for head in layer.heads if head.index in indices]
        if len(heads) < len(indices):
            self.refused.update(layer.refused)
            return
        if self.live.heads:
            heads = [replace(head, lookahead=0 if causal else None) for head in heads]
        assert inputs.x_query is not None and inputs.x_key is not None
        num_texts, num_queries, _ = inputs.x_query.shape
        key: Key = self.sites.index(site), run.mode
        window = heads[0].lookback, heads[0].lookahead
        shape = num_texts, len(heads), num_queries, inputs.x_key.shape[1]
        sample = self._sample(key, shape, window, inputs.x_query.device)
        if sample is not None and not len(sample):
            return
        with torch.no_grad(), torch.autocast(inputs.x_query.device.type, enabled=False):
            mask, positions = read_padding(inputs, run.given, site.block, indices, is_causal=heads[0].lookahead == 0)
            statistics = observe(
                heads, inputs.x_query, inputs.x_key,
                mask=mask, positions=positions, sample=sample, near=self.scope.near, blocks=self.scope.blocks,
            )  # fmt: skip
        self.through[key[0]] = MODULE_INPUTS
        num_there = num_texts * num_queries
        self.tallies[key].add(statistics, num_there=num_there, x=inputs.x_query, valid=mask.query_valid)

    def _discover(self, call: AttentionCall, run: WatchedPass) -> AttentionModule | None:
        """The layer of a module that no table names: by its name, and the index of this call."""
        known = [site for index, site in enumerate(self.sites) if self.agreement.may_be(index, site)]
        site = discovered(call, run, self.modules, known)
        if site is not None:
            self.calling.add(site.query_name)
            self.found.add(site, call)
            if site not in self.sites:
                self._append(site)
        return site if site is not None and self._is_wanted(site) else None

    @property
    def order(self) -> Sequence[int]:
        """The sites in an order that all processes share."""
        return self.agreement.order(len(self.sites))

    def number(self, index: int) -> int:
        """The number of a site's layer over all processes."""
        return self.agreement.numbers.get(index, self.sites[index].number)

    def own_index(self, block: Block, number: int) -> int | None:
        """The site of a layer that this process holds; None for one whose weights another measures."""
        indices = (
            index for index, site in enumerate(self.sites) if (site.block, self.number(index)) == (block, number)
        )
        index = next(indices)
        return None if index in self.agreement.foreign and self.agreement.is_spread else index

    def merged(self) -> dict[Key, Tally]:
        """The tallies over all processes, which first agree on their layers.

        Some may have made no calls, or hold other stages of a pipeline.
        """
        if has_others(self.group) and (not self.is_known or self.agreement.settled is None):
            self.agreement.agree(self.sites, self._append)
        if self.agreement.is_renamed:
            self.refused.add(RENAMED)
        keys: list[Key] = [(index, mode) for index in self.order for mode in MODES]
        return dict(zip(keys, merge_tallies([self.tallies[key] for key in keys], self.group), strict=True))

    def check(self, seen: Sequence[LayerReport], *, has_run: bool) -> None:
        """Refuse a model whose passes showed nothing; note what they did not show of one that no table knows."""
        if self.is_known:
            return
        if has_run and not seen:
            if self.refused:
                raise Refusal("; ".join(sorted(self.refused)))
            written = written_out(self.modules, self.softmaxes, self.calling)
            instead = f", but a softmax of its own in {', '.join(written)}" if written else ""
            raise refusal(
                "attention that calls a kernel (scaled_dot_product_attention, FlexAttention, flash-attn, "
                "nn.MultiheadAttention), or a model that is known",
                f"neither in {type(self.model).__name__}{instead}",
                "name its projections by Live(model, heads=[(query, key, num_heads, num_key_heads), …], causal=…)",
            )
        if seen:
            own = [site for index, site in enumerate(self.sites) if index not in self.agreement.foreign]
            self.refused.update(silent_modules(self.modules, self.softmaxes, self.calling))
            self.refused.update(repeated(own))
            self.refused.update(self.found.unexplained())

    def _append(self, site: AttentionModule) -> None:
        self.sites.append(site)
        self._add_tallies(len(self.sites) - 1)
        self.spending.num_layers = len(self.sites)

    def _add_tallies(self, index: int) -> None:
        device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        for mode in MODES:
            self.tallies[index, mode] = Tally.empty(len(self.indices(self.sites[index])), device)

    def _sample(
        self, key: Key, shape: tuple[int, int, int, int], window: tuple[int | None, int | None], device: torch.device
    ) -> Tensor | None:
        """Choose queries to look at, None for all; there are none to look at where the budget is spent."""
        wanted = self.spending.num_queries(key, shape, lookback=window[0], lookahead=window[1])
        if wanted == 0:
            return torch.empty(0, dtype=torch.long)
        sample = sample_queries(shape[2], wanted, self.generator)
        return None if sample is None else sample.to(device)


def _fits(logits: Tensor, inputs: ModuleInputs | None) -> bool:
    """Tell whether a softmax is the module's attention: as many queries and keys as it was given, and not shifted."""
    if inputs is None or inputs.x_query is None or inputs.x_key is None or is_shifted(logits):
        return False
    return logits.shape[-2] == inputs.x_query.shape[1] and logits.shape[-1] >= inputs.x_key.shape[1]
