"""One pass over a sample: do the heads that were read of a model give the logits of its own calls?

Where they do not, the call itself is explained, as for an unknown model, and the result takes their place.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...attention.calls import AttentionCall
from ...attention.compilation import Eagerly
from ...attention.interception import Interception
from ...errors import Refusal
from ..coverage import Coverage, spans
from ..module import AttentionModule, refused_module
from ..reader import read_heads
from .agreement import difference, is_normed
from .discover import Finder
from .tensors import ModuleTensors, called
from .watch import Product, Sample, quietly, run


@dataclass
class Outcome:
    """Outcome of the calls of one attention module: nothing yet, that its heads are right, or what differs."""

    was_run: bool = False
    words: str | None = None
    instead: AttentionModule | None = None


@dataclass
class Trial:
    """Told of every call of a pass by its interception."""

    tensors: ModuleTensors
    sites: Sequence[AttentionModule]
    outcomes: list[Outcome] = field(default_factory=list)
    further: list[str] = field(default_factory=list)  # modules whose attention is none of these sites'

    def __post_init__(self) -> None:
        self.finder, self.outcomes = Finder(self.tensors), [Outcome() for _ in self.sites]
        self.by_names: dict[tuple[str, str], list[int]] = defaultdict(list)
        for index, site in enumerate(self.sites):
            self.by_names[site.query_name, site.key_name].append(index)
        self.num_calls: Counter[tuple[str, str]] = Counter()

    def over(self, sample: Sample) -> "Trial":
        """Run the model once, in evaluation mode, without gradients and outside of compiled code."""
        seeing, model = Interception(self.see, written_out=True), called(self.tensors.given)
        with Eagerly(), quietly(model), self.finder.recording(), seeing:
            run(model, sample)
        self.finder.watch.clear()
        return self

    def see(self, call: AttentionCall) -> None:
        if not self.finder.may_be_attention(call):
            return
        products = {product.name: product for product in self.finder.watch.products}
        names = next((names for names in self.by_names if names[0] in products and names[1] in products), None)
        if names is None:
            self.further.append(self.finder.name_of(call))
        else:  # layers may share their projections, as ALBERT's do: then they are called in their order
            indices, number = self.by_names[names], self.num_calls[names]
            self.num_calls[names] += 1
            self._judge(indices[number % len(indices)], call, (products[names[0]], products[names[1]]))
        self.finder.watch.next_call()

    def _judge(self, index: int, call: AttentionCall, products: tuple[Product, Product]) -> None:
        outcome = self.outcomes[index]
        with torch._C.DisableTorchFunction(), torch.no_grad():
            try:
                words = self._difference(read_heads(self.sites[index]), call, products)
            except (Refusal, RuntimeError) as reason:
                words = f"it could not be compared: {reason}"
        if words is not None and outcome.words is None:
            self.outcomes[index] = Outcome(True, words, self.finder.explained(call))
        outcome.was_run = True

    def _difference(self, layer: AttentionModule, call: AttentionCall, products: tuple[Product, Product]) -> str | None:
        if layer.refused:
            return layer.refused[0]
        words = difference(layer.heads, products[0].x, products[1].x, call)
        if words is not None:
            return words
        for side, product in (("query", products[0]), ("key", products[1])):
            norm = getattr(layer.heads[0], side).input_norm
            if norm is not None and not any(is_normed(norm, before, product.x) for before in self._normed(product.x)):
                return f"what `{product.name}` is given does not come from its input norm"
        return None

    def _normed(self, x: Tensor) -> list[Tensor]:
        """List the inputs of norms whose output has the shape of x, the last first."""
        return [norm.x for norm in reversed(self.finder.watch.norms) if norm.x.shape == x.shape]

    def judged(self) -> list[AttentionModule]:
        """The sites, with those that differ replaced by what the call shows, or refused."""
        return [self._site(site, outcome) for site, outcome in zip(self.sites, self.outcomes, strict=True)]

    def _site(self, site: AttentionModule, outcome: Outcome) -> AttentionModule:
        if outcome.words is None or outcome.instead is None:
            return site
        instead, names = outcome.instead, (site.query_name, site.key_name)
        if instead.reason is None and (instead.query_name, instead.key_name, instead.block) == (*names, site.block):
            return replace(instead, number=site.number)
        why = instead.reason or f"its call is of {instead.block} attention by `{instead.query_name}`"
        reason = f"not as its config says ({outcome.words}); {why}"
        return refused_module(site.block, names, reason, number=site.number)

    def coverage(self, before: Coverage, judged: Sequence[AttentionModule]) -> Coverage:
        """Update the coverage by the pass: proven where it ran, with the differences that it showed."""
        ran = [outcome.was_run for outcome in self.outcomes]
        differs = [outcome.words is not None for outcome in self.outcomes]
        replaced = [differ and site.num_heads > 0 for differ, site in zip(differs, judged, strict=True)]
        lost = [differ and not new for differ, new in zip(differs, replaced, strict=True)]
        reasons = [f"{self._named(lost)}: {self._first_words(lost)}"] if any(lost) else []
        reasons += [f"the attention of `{self.further[0]}`, which no row names"] if self.further else []
        remarks = ["run on the sample"]
        if any(replaced):
            remarks.append(f"{self._named(replaced)} as run, not as the config says ({self._first_words(replaced)})")
        basis = ""
        if not all(ran):
            basis = f"{before.basis} in {self._named([not one for one in ran])}" if any(ran) else before.basis
            remarks = remarks[1:]
        reasons, remarks = (*before.reasons, *reasons), (*before.remarks, *remarks)
        return replace(before, num_read=before.num_read - sum(lost), basis=basis, reasons=reasons, remarks=remarks)

    def _first_words(self, which: Sequence[bool]) -> str:
        return next(one.words or "" for one, is_it in zip(self.outcomes, which, strict=True) if is_it)

    def _named(self, which: Sequence[bool]) -> str:
        """Sites by block and numbers."""
        blocks: dict[str, list[int]] = defaultdict(list)
        for site, is_it in zip(self.sites, which, strict=True):
            if is_it:
                blocks[site.block].append(site.number)
        return ", ".join(f"{block} layers {spans(sorted(numbers))}" for block, numbers in blocks.items())
