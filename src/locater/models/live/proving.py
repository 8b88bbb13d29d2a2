"""One attention call explained: which parameters made its queries and keys, and how, proven by its logits.

`explain` says how vectors follow from products with parameters; the heads so found must give the call's logits again.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from ...attention.arguments import with_four_dimensions
from ...attention.calls import AttentionCall
from ...errors import Refusal, refusal
from ...positions import Rotary
from ..module import module_of_row
from ..reader import read_heads
from ..schema import Attention, NormAt, Starts
from .explain import (
    EPSILONS,
    alike,
    batched,
    cut_heads,
    explain_plain,
    explain_rotation,
    is_transposed,
    norm_behind,
    norm_over,
    read_norm_of,
    tolerance,
    turned,
)
from .head_norms import Gain, Made, Source, Vectors, explain_behind, explain_normed, explain_scaled
from .logits import Reach, is_all_within, of_scores, reach
from .tensors import ModuleTensors
from .watch import BY_NAME, PassRecord, Product, module_of

MOST_TOKENS = 128  # of a call, for the search and the proof; later tokens follow the same rule


class Search:
    """One call, cut to its first tokens, and what may have made its vectors."""

    def __init__(self, call: AttentionCall, watch: PassRecord, tensors: ModuleTensors) -> None:
        call = with_four_dimensions(call if call.logits is None else of_scores(call, watch.scores))
        self.call, self.watch, self.tensors = call, watch, tensors
        self.allowed, self.otherwise = tolerance(call.query.dtype), None
        self.query, self.key = (part.transpose(1, 2)[:, :MOST_TOKENS].float() for part in (call.query, call.key))
        if not (bool(self.query.any()) and bool(self.key.any())):  # any rows of a weight would explain them
            raise refusal("queries and keys that are not all zero", "zeros", f"{BY_NAME}, or look again after a step")

    def row(self) -> Attention:
        """The first pair of explanations, of queries and of keys, that gives the call's logits again."""
        where, first = reach(self.call, self.allowed), None
        for query, rotary in self._queries():
            for key in self._made(self.key):
                if not self._is_beside(query, key, rotary):
                    continue
                try:
                    row = self._row(query, key, rotary, where)
                    self._prove(row, query, key)
                    self.otherwise = self._otherwise(row, query.product.x)
                    return row
                except Refusal as reason:
                    first = first or reason
            first = first or self._unexplained("keys")
        raise first or self._unexplained("queries")

    def _is_beside(self, query: Made, key: Made, rotary: Rotary | None) -> bool:
        """Tell whether the keys turn by the queries' rotation, on the same side of their gain."""
        if not alike(turned(rotary, key.plain), key.without_gain(self.key), self.allowed):
            return False
        return (key.behind is None) == (query.behind is None) and (rotary is None or self._is_in_order(key))

    def _unexplained(self, side: str) -> Refusal:
        names = dict.fromkeys(f"`{one.name}`" for one in self.watch.products[-4:])
        return refusal(
            f"{side} that are rows of one product with a parameter, normed or not, then turned or not",
            f"something else after {', '.join(names) or 'no product with a parameter'}",
            BY_NAME,
        )

    def _queries(self) -> Iterator[tuple[Made, Rotary | None]]:
        for made in self._made(self.query):
            rotation = explain_rotation(made.without_gain(self.query), made.plain, self.allowed)
            if rotation is not None and (made.behind is None if rotation[0] is None else self._is_in_order(made)):
                yield made, rotation[0]

    def _made(self, vectors: Vectors) -> Iterator[Made]:
        """Every product and way that leads to these vectors: without a norm before with one, the last product first."""
        sources = [Source(one, rows) for one in reversed(self.watch.products) for rows in self._rows(one, vectors)]
        gains, epsilons = self._gains(vectors), self._epsilons()
        normed = (
            partial(explain, gains=gains, epsilons=epsilons)
            for explain in (explain_normed, explain_behind, explain_scaled)
        )
        for explain in (explain_plain, *normed):
            for source in sources:
                found = explain(vectors, source, allowed=self.allowed)
                yield from (made for made in found if self._accounts_for_all(made, vectors))

    def _accounts_for_all(self, made: Made, vectors: Vectors) -> bool:
        """Tell whether each trained parameter that came in after the product is in the explanation.

        Without this a learned scale that is 1 now, or any other number, would be taken for a constant.
        """
        gain = None if made.norm is None else made.norm.name
        known = gain, f"{gain}.bias", f"{gain}_bias"
        further = self.watch.came_into(self._given(vectors)) - self.watch.came_into(made.product.y)
        if any(module_of(name) not in known and self.tensors.parameter(name).requires_grad for name in further):
            return False
        return made.norm is None or not made.norm.single or self._is_behind_norm(made, made.norm.name)

    def _is_behind_norm(self, made: Made, gain: str) -> bool:
        """Tell whether a single number came in after the norm: one that came before it has no effect to speak of."""
        size, values = made.plain.shape[-1], self._values(gain, made.plain)
        if len(values) > 1:
            values = values.unflatten(0, (-1, size)).repeat_interleave(len(made.starts) * size // len(values), 0)
        before = (cut_heads(made.source.rows, made.starts, size) * values)[:, :, self._distinct(made)]
        return not any(alike(one, before, 10 * self.allowed) for one in self._computed_from(gain, before))

    def _given(self, vectors: Vectors) -> Tensor:
        return self.call.query if vectors is self.query else self.call.key

    @staticmethod
    def _distinct(made: Made) -> list[int]:
        """Heads with rows of their own: a key may be repeated for all heads of its group."""
        return [made.starts.index(start) for start in dict.fromkeys(made.starts)]

    def _is_in_order(self, made: Made) -> bool:
        """Tell whether a gain came before the rotation, if said so: while its numbers are all alike, the two commute.

        What the norm gave must then be among what was computed from the gain, unless nothing of that size was seen.
        """
        norm = made.norm
        if norm is None or norm.plain or norm.single or made.behind is not None:
            return True
        plain = made.plain[:, :, self._distinct(made)] / made.factor
        shaped = list(self._computed_from(norm.name, plain))
        return not shaped or any(alike(one, plain, 10 * self.allowed) for one in shaped)

    def _computed_from(self, gain: str, plain: Vectors) -> Iterator[Tensor]:
        """Yield tensors of that size computed from a gain, as (texts, tokens, heads, d_head) whichever way they lay."""
        tokens = max(self.call.query.shape[2], self.call.key.shape[2])
        batch, _, heads, size = plain.shape
        seen = (one for one, names in self.watch.marks.values() if gain in map(module_of, names))
        for one in (one for one in seen if one.is_floating_point() and one.numel() == batch * tokens * heads * size):
            yield one.reshape(batch, tokens, heads, size)[:, :MOST_TOKENS].float()
            yield one.reshape(batch, heads, tokens, size).transpose(1, 2)[:, :MOST_TOKENS].float()

    def _rows(self, product: Product, vectors: Vectors) -> Iterator[Tensor]:
        tokens = self._given(vectors).shape[2]
        if product.y.shape[-1] >= vectors.shape[-1]:
            yield from (rows[:, :MOST_TOKENS].float() for rows in batched(product.y, vectors.shape[0], tokens))

    @cached_property
    def _attention(self) -> nn.Module | None:
        return next((module for module in self.call.modules if any(True for _ in module.parameters())), None)

    def _gains(self, vectors: Vectors) -> list[Gain]:
        """List the gains a norm inside the attention module may have: those known to have come into these vectors.

        Gains are all alike at the start of a training, so their numbers do not tell which one it was, nor whether there
        was any. Where nothing is known to have come in, it may be any of them, or none.
        """
        inside = set() if self._attention is None else {id(one) for one in self._attention.parameters()}
        shape, given = vectors.shape[-2:], self._given(vectors)
        known = self.watch.came_into(given)
        names = [
            name
            for name, (module, attribute) in self.tensors.owners.items()
            if attribute != "bias" and id(module._parameters.get(attribute)) in inside
            if _is_gain(self.tensors.shape(name), *shape) and not _is_single(self.tensors.shape(name), *shape)
        ]
        used = [name for name in names if name in known]
        singles = known.difference(*(self.watch.came_into(product.y) for product in self.watch.products))
        used += [
            name
            for name in sorted(singles)
            if _is_single(self.tensors.shape(name), *shape)
            and not self.watch.is_changed(name, self.tensors.parameter(name))
        ]
        gains = [self._gain(name, vectors) for name in used or names]
        less_one = [replace(gain, values=gain.values + 1, plus_one=True) for gain in gains if not gain.single]
        return [*([] if used else [Gain(None, torch.ones(1))]), *gains, *less_one]

    def _gain(self, name: str, vectors: Vectors) -> Gain:
        bias = module_of_row(Attention("decoder", "", ""), self.tensors).bias(module_of(name))
        bias = None if bias is None else bias.detach().float().flatten()
        single = _is_single(self.tensors.shape(name), *vectors.shape[-2:])
        return Gain(module_of(name), self._values(name, vectors), bias, single=single)

    def _values(self, name: str, vectors: Vectors) -> Tensor:
        """A gain's numbers; of one number for each head, as many as the head has."""
        stored = next(one for one in (name, f"{name}.weight", f"{name}_weight") if one in self.tensors.names)
        values, (heads, size) = self.tensors.read(stored).detach().float().flatten(), vectors.shape[-2:]
        if len(values) == 1 or not _is_single(self.tensors.shape(stored), heads, size):
            return values
        return values.repeat_interleave(size)

    def _epsilons(self) -> list[float]:
        """List epsilons: those that the attention module's parts state, then the usual ones."""
        finest, stated = torch.finfo(self.call.query.dtype).eps, []
        for module in [] if self._attention is None else self._attention.modules():
            values = (getattr(module, word, None) for word in ("eps", "variance_epsilon"))
            stated += [value for value in values if isinstance(value, float)]
            stated += [finest] if isinstance(module, nn.RMSNorm) and module.eps is None else []
        return [*dict.fromkeys([*stated, *EPSILONS, finest])]

    def _row(self, query: Made, key: Made, rotary: Rotary | None, where: Reach) -> Attention:
        starts = tuple(dict.fromkeys(key.starts))
        times = len(key.starts) // len(starts)
        if len(query.starts) % len(starts) or key.starts != tuple(s for s in starts for _ in range(times)):
            raise refusal("query heads in equal groups, one after the other, each with one key head", key.starts)
        is_cross = query.product.x.shape != key.product.x.shape or not torch.equal(query.product.x, key.product.x)
        input_norm = self._input_norm(query.product.x)
        return Attention(
            block="cross" if is_cross else "decoder" if where.lookahead == 0 else "encoder",
            query=query.product.name,
            key=key.product.name,
            heads=len(query.starts),
            key_heads=len(starts),
            d_model=query.product.x.shape[-1],
            d_head=self.query.shape[-1],
            fused=_fused(query, key, starts),
            transposed=self._transposed(query.product, key.product),
            input_norm=input_norm,
            key_input_norm=self._input_norm(key.product.x) if is_cross else None,
            query_norm=query.norm,
            key_norm=key.norm,
            norm_over=norm_over(query, key),
            rotary=rotary,
            turns_first=query.behind is not None,
            alibi=where.alibi,
            scale=query.factor * key.factor * self.call.scaling,
            softcap=self.call.softcap,
            lookback=None if is_cross else where.lookback,
            lookahead=None if is_cross else where.lookahead,
            sink=self._sink(),
        )

    def _otherwise(self, row: Attention, x: Tensor) -> str | None:
        """Describe who sees whom in the call, where the row's window does not say it."""
        texts, _, tokens, _ = self.call.query.shape
        alike = x.dim() == 2 or (len(x) == texts and x.shape[1:-1].numel() == tokens)
        if not alike and tuple(x.shape[:2]) != (tokens, texts):
            return "has its tokens cut into other texts after the projection"
        is_window = is_all_within(self.call, row.lookback, row.lookahead)  # type: ignore[arg-type]
        return None if is_window else "is masked otherwise than by a window"

    def _sink(self) -> str | None:
        """The parameter with the logits of a key that is no token; None for no such key."""
        if self.call.sinks is None:
            return None
        sinks = self.call.sinks.detach().float().flatten()
        for name, (module, attribute) in self.tensors.owners.items():
            stored = module._parameters.get(attribute) if any(module is one for one in self.call.modules) else None
            numbers = None if stored is None or stored.numel() != len(sinks) else stored.detach().float().flatten()
            if numbers is not None and alike(numbers, sinks, self.allowed):
                return module_of(name)
        raise refusal("a parameter of the attention with its sinks", "other numbers")

    def _transposed(self, *products: Product) -> bool:
        """Tell whether the weights are stored as (in, out)."""
        found = {is_transposed(product, self.tensors, 10 * self.allowed) for product in products}
        if len(found) > 1:
            raise refusal("query and key weights stored the same way", "one of them transposed")
        return found.pop()

    def _input_norm(self, x: Tensor) -> NormAt | None:
        """The norm whose output the projection was given, if it was one; refused where it cannot be made again."""
        if (norm := norm_behind(self.watch.norms, x)) is None:
            return None
        if (place := read_norm_of(norm, 10 * self.allowed)) is None:
            raise refusal("an input norm by mean and variance", f"`{norm.name}` ({type(norm.module).__name__})")
        return place

    def _prove(self, row: Attention, query: Made, key: Made) -> None:
        """The heads of the row, computed in float64, give the logits of the call again, to the call's own precision."""
        # Without this a row that only fits by its names and sizes would be read, and all its numbers would be wrong.
        layer = read_heads(module_of_row(row, self.tensors))
        if layer.refused:
            raise Refusal(layer.refused[0])
        batch, call = self.call.query.shape[0], self.call
        sides = ((query.product.x, call.query.shape[2]), (key.product.x, call.key.shape[2]))
        x_query, x_key = (next(batched(x, batch, tokens))[:1, :MOST_TOKENS].double() for x, tokens in sides)
        query_part, key_part = (part[:1].transpose(1, 2).double() for part in (self.query, self.key))
        cut = replace(call, query=query_part, key=key_part, value=key_part, x=None)
        for head, expected in zip(layer.heads, cut.raw()[0], strict=True):
            logits = replace(head, position_bias=None).logits(x_query, x_key)[0].detach()
            if not alike(logits, expected, self.allowed):
                names = f"`{query.product.name}` and `{key.product.name}`"
                raise refusal(f"the call's logits from {names}", f"others in head {head.index}")


def _is_gain(shape: tuple[int, ...], num_heads: int, size: int) -> bool:
    """One number for each of a head's, or of all heads'."""
    return len(shape) == 1 or (len(shape) == 2 and shape[1] == size and shape[0] <= num_heads)


def _is_single(shape: tuple[int, ...], num_heads: int, size: int) -> bool:
    """One number for all heads, or one for each: not to be taken for a gain of a head's size."""
    numbers = math.prod(shape)
    one_each = num_heads % numbers == 0 and numbers == max(shape, default=1)
    return numbers == 1 or (one_each and (numbers != size or len(shape) > 1))


def _fused(query: Made, key: Made, key_starts: tuple[int, ...]) -> Starts | None:
    """None for two tensors, each with its heads in order and nothing else."""
    size = query.plain.shape[-1]
    sides = ((query.product, query.starts), (key.product, key_starts))
    plain = all(
        starts == tuple(range(0, size * len(starts), size)) and product.y.shape[-1] == size * len(starts)
        for product, starts in sides
    )
    return None if plain and query.product.name != key.product.name else Starts(query.starts, key_starts)
