"""One pass over a sample: do the heads that were read of a model give the logits of its own calls?

Where they do not, the call itself is explained, as for an unknown model, and the result takes their place.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...attention.arguments import read_arguments
from ...attention.call_statistics import mask_of_call
from ...attention.calls import AttentionCall
from ...errors import Refusal, missing, refusal
from ...head import Head
from ...projections import Norm, whole, widen
from ..coverage import Coverage, spans
from ..module import AttentionModule, refused_module
from ..reader import read_heads
from .discover import Finder
from .explain import batched, tolerance
from .tensors import ModuleTensors
from .watch import Product, Sample


class Trial:
    """Told of every call of a pass by its interception."""

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
        self.finder.watch.clear()
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


# -------------------------------------------------------------------------------------------- heads held against a call
MOST_TOKENS, MOST_TEXTS = 64, 4
PAIRS = "texts heads queries keys"


@torch.no_grad()
def difference(
    heads: Sequence[Head], x_query: Tensor, x_key: Tensor, call: AttentionCall, *, masks: bool = True
) -> str | None:
    """Describe where the heads do not reproduce the call; None where they do. `masks`: compare admitted pairs, too.

    Compared are admitted pairs among some of the tokens, the first and the last included, since the length of a text
    may change its rotation. Refused where the call and the inputs are not of the same tokens.
    """
    with torch.autocast(call.query.device.type, enabled=False):
        call = read_arguments(call, len(heads))
        texts, num_heads, num_queries, num_keys = call.shape
        if num_heads != len(heads):
            return f"{num_heads} heads, where {len(heads)} were read"
        num_tokens = None if heads[0].block == "cross" else num_queries
        inputs = _texts_first(x_query, texts, num_queries), _texts_first(x_key, texts, num_tokens)
        positions = tuple(_spread(x.shape[1], x.device) for x in inputs)
        further = num_keys - inputs[1].shape[1]  # keys that are no tokens: a sink's column, or what came from elsewhere
        if further < 0:
            raise refusal(f"a call over {inputs[1].shape[1]} keys", num_keys)
        if further != 0 and not (further == 1 and call.logits is not None and heads[0].sink is not None):
            return f"{further} keys are none that its projections made"
        columns = torch.cat([positions[1], positions[1].new_full((further,), num_keys - 1)])
        theirs, admitted = _logits(call, positions[0], columns)
        if not bool(admitted.any()):
            raise missing("keys that a query may see")
        eps = max(torch.finfo(part.dtype).eps for part in (x_query, heads[0].query.weight, call.query))
        x_parts = tuple(x[:MOST_TEXTS, at].double() for x, at in zip(inputs, positions, strict=True))
        if masks and heads[0].block != "cross":
            shown = admitted[..., : len(positions[1])]
            words = [_other_mask(head, shown[:, row], positions) for row, head in enumerate(heads)]
            if any(words):
                return next(f"head {head.index} {word}" for head, word in zip(heads, words, strict=True) if word)
        return _compare(heads, x_parts, positions, theirs.double(), admitted, max(1e-5, 4 * eps))


def _compare(
    heads: Sequence[Head],
    inputs: tuple[Tensor, ...],
    positions: tuple[Tensor, ...],
    theirs: Float[Tensor, PAIRS],
    admitted: Bool[Tensor, PAIRS],
    allowed: float,
) -> str | None:
    """The first head that differs."""
    for row, head in enumerate(heads):
        own, seen = head.logits(*inputs, positions), admitted[:, row]  # type: ignore
        if head.sink is not None and theirs.shape[-1] > own.shape[-1]:
            own = torch.cat([own, head.sink.to(own).expand(*own.shape[:-1], 1)], -1)
        gap, largest = own - theirs[:, row], float(theirs[:, row][seen].abs().max())
        # Softmax does not see a number per query: some models count ALiBi from the first key.
        shift = gap.masked_fill(~seen, 0).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)
        error = min(float(one[seen].abs().max()) for one in (gap, gap - shift))
        if not error <= allowed * max(largest, _reach(head, inputs)):
            return f"head {head.index} has other logits, by {error:.2g} where the largest is {largest:.3g}"
    return None


def _other_mask(head: Head, seen: Bool[Tensor, "texts queries keys"], positions: tuple[Tensor, ...]) -> str | None:
    """Describe how the call's mask differs: a key beyond the head's reach, or a distance within it that no query sees.

    Padding is ignored: keys that no query sees, and queries that see nothing.
    """
    admits = head.admits(*positions)
    if bool((seen & ~admits).any()):
        return "is shown keys that it should not see"
    wanted = (admits & seen.any(-1, keepdim=True) & seen.any(-2, keepdim=True)).any(0)
    distance = positions[0][:, None] - positions[1]
    lost = set(distance[wanted].tolist()) - set(distance[seen.any(0)].tolist())
    return f"is not shown keys at a distance of {min(lost, key=abs)}" if lost else None


def _reach(head: Head, inputs: tuple[Tensor, ...]) -> float:
    """scale·|q||k| of the longest vectors: rounding errors of a product are of that size, however small it is."""
    longest = [float(side(x).norm(dim=-1).max()) for side, x in zip((head.query, head.key), inputs, strict=True)]
    return longest[0] * longest[1] * head.scale


def _logits(
    call: AttentionCall, rows: Int[Tensor, " queries"], columns: Int[Tensor, " keys"]
) -> tuple[Float[Tensor, PAIRS], Bool[Tensor, PAIRS]]:
    """Compute a call's logits, the input of its softmax, for some pairs, and which of these it admits."""
    if call.score is not None:
        raise refusal("logits that no function changes", "a score_mod")
    query, key = widen(call.query[:MOST_TEXTS, :, rows]), widen(call.key[:MOST_TEXTS, :, columns])
    scale = query.shape[-1] ** -0.5 if call.scale is None else float(call.scale)
    logits = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * scale
    logits = logits if call.softcap is None else torch.tanh(logits / call.softcap) * call.softcap
    texts, heads, some, every = (slice(0, size) for size in (len(query), query.shape[1], len(rows), call.shape[3]))
    mask = mask_of_call(call).part(texts, heads).at(rows)
    if mask.added is not None:
        logits = logits + mask.added[..., columns]
    if call.slopes is not None:
        slopes = (call.slopes if call.slopes.dim() == 2 else call.slopes[None])[texts]
        logits = logits - slopes[:, :, None, None] * mask.distance(some, every)[:, None, :, columns].abs()
    return logits, mask.block(some, every)[..., columns].expand(logits.shape)


def _spread(number: int, device: torch.device) -> Int[Tensor, " chosen"]:
    """Indices of all tokens, or of some from the first to the last."""
    return torch.linspace(0, number - 1, min(number, MOST_TOKENS), device=device).round().long().unique()


def _texts_first(x: Tensor, texts: int, tokens: int | None) -> Float[Tensor, "texts tokens d_model"]:
    """The input with texts first, whichever way it lay; `tokens` is None where only the texts are known."""
    x = whole(x.detach())
    tokens = x.shape[:-1].numel() // texts if tokens is None else tokens
    if (found := next(batched(x, texts, tokens), None)) is None:
        raise refusal(f"an input of {texts} texts of {tokens} tokens", tuple(x.shape))
    return found


def is_normed(norm: Norm, before: Tensor, x: Tensor) -> bool:
    """Tell whether an input is a norm's output for the tensor before it."""
    own, allowed = norm(before.double()), 10 * tolerance(x.dtype) * max(float(x.abs().max()), 1e-30)
    return own.shape == x.shape and float((own - x.double()).abs().max()) <= allowed


def is_of_length(norm: Norm, x: Tensor) -> bool:
    """Tell whether an input is short enough for a norm: without gain and bias its root mean square is at most 1."""
    plain = widen(whole(x.detach()))
    plain = plain if norm.bias is None else plain - norm.bias.to(plain)
    if norm.gain is not None:
        used = norm.gain.abs() > 1e-3 * norm.gain.abs().max()  # where the gain is next to nothing, so is what is left
        plain = plain[..., used] / norm.gain[used].to(plain)
    return norm.kind == "l2" or float(plain.square().mean(-1).max()) <= 1 + 8 * torch.finfo(x.dtype).eps + 1e-3
