"""One attention call explained: which parameters made its queries and keys, and how, proven by its logits.

`explain` says how vectors follow from products with parameters; the heads so found must give the call's logits again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ...attention.calls import AttentionCall
from ...errors import Refusal, refusal
from ...positions import Rotary
from ...projections import Norm
from ..module import module_of_row
from ..reader import read_heads
from ..schema import Attention, NormAt, Starts
from .explain import alike, explain_plain, explain_rotation, tolerance, turned
from .head_norms import Gain, HeadNorm, Side, Vectors, explain_behind, explain_normed, explain_scaled
from .masks import Reach, reach
from .tensors import ModuleTensors
from .watch import Normed, Product, Watch, module_of

MOST_TOKENS = 128  # of a call, for the search and the proof; later tokens follow the same rule
EPSILONS = (1e-5, 1e-6, 1e-8, 0.0)


@dataclass(frozen=True)
class Made:
    """One side of a call by a product: `plain` before any rotation, `behind` a gain that came after one."""

    product: Product
    side: Side
    plain: Vectors
    behind: Tensor | None = None

    def before(self, vectors: Vectors) -> Vectors:
        return vectors if self.behind is None else vectors / self.behind


class Search:
    """One call, cut to its first tokens, and what may have made its vectors."""

    def __init__(self, call: AttentionCall, watch: Watch, tensors: ModuleTensors) -> None:
        if call.logits is not None:
            raise refusal(
                "attention through a kernel",
                "one written out, whose queries and keys are not seen",
                "call scaled_dot_product_attention, or name the projections by heads=…",
            )
        self.call, self.watch, self.tensors = call, watch, tensors
        self.allowed = tolerance(call.query.dtype)
        self.query, self.key = (part.transpose(1, 2)[:, :MOST_TOKENS].float() for part in (call.query, call.key))

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
                    return row
                except Refusal as reason:
                    first = first or reason
            first = first or self._unexplained("keys")
        raise first or self._unexplained("queries")

    def _is_beside(self, query: Made, key: Made, rotary: Rotary | None) -> bool:
        """Tell whether the keys turn by the queries' rotation, on the same side of their gain."""
        if not alike(turned(rotary, key.plain), key.before(self.key), self.allowed):
            return False
        return (key.behind is None) == (query.behind is None) and (rotary is None or self._is_in_order(key))

    def _unexplained(self, side: str) -> Refusal:
        names = dict.fromkeys(f"`{one.name}`" for one in self.watch.products[-4:])
        return refusal(
            f"{side} that are rows of one product with a parameter, normed or not, then turned or not",
            f"something else behind {', '.join(names) or 'no product with a parameter'}",
            "name the projections by heads=…",
        )

    def _queries(self) -> Iterator[tuple[Made, Rotary | None]]:
        for made in self._made(self.query):
            rotation = explain_rotation(made.before(self.query), made.plain, self.allowed)
            if rotation is not None and (made.behind is None if rotation[0] is None else self._is_in_order(made)):
                yield made, rotation[0]

    def _made(self, vectors: Vectors) -> Iterator[Made]:
        """Every product and way that leads to these vectors: without a norm before with one, the last product first."""
        products = [(one, rows) for one in reversed(self.watch.products) for rows in self._rows(one, vectors)]
        for product, rows in products:
            for side, plain in explain_plain(vectors, rows, self.allowed):
                yield Made(product, side, plain)
        gains, epsilons = self._gains(vectors), self._epsilons()
        given = self.call.query if vectors is self.query else self.call.key
        for explain in (explain_normed, explain_behind, explain_scaled):
            for product, rows in products:
                usable = gains if explain is not explain_scaled or self.watch.adds_only(given, product.y, gains) else []
                for found in cast(Any, explain)(vectors, rows, usable, epsilons, self.allowed):
                    yield Made(product, *found)

    def _is_in_order(self, made: Made) -> bool:
        """Tell whether a gain came before the rotation, if said so: while its numbers are all alike, the two commute.

        What the norm gave must then be among what was computed from the gain, unless nothing of that size was seen.
        """
        norm, starts = made.side.norm, made.side.starts
        if norm is None or norm.gain is None or made.behind is not None:
            return True
        plain = made.plain[:, :, [starts.index(start) for start in dict.fromkeys(starts)]] / made.side.factor
        seen = [one for one, names in self.watch.marks.values() if norm.gain in map(module_of, names)]
        shaped = [form for one in seen for form in self._shapes(one, plain)]
        return not shaped or any(alike(one, plain, 10 * self.allowed) for one in shaped)

    def _shapes(self, one: Tensor, plain: Vectors) -> Iterator[Tensor]:
        """A tensor as (texts, tokens, heads, d_head), if it has that many numbers, whichever way it lies."""
        tokens = max(self.call.query.shape[2], self.call.key.shape[2])
        batch, _, heads, size = plain.shape
        if one.is_floating_point() and one.numel() == batch * tokens * heads * size:
            yield one.reshape(batch, tokens, heads, size)[:, :MOST_TOKENS].float()
            yield one.reshape(batch, heads, tokens, size).transpose(1, 2)[:, :MOST_TOKENS].float()

    def _rows(self, product: Product, vectors: Vectors) -> Iterator[Tensor]:
        tokens = (self.call.query if vectors is self.query else self.call.key).shape[2]
        if product.y.shape[-1] >= vectors.shape[-1]:
            yield from (rows[:, :MOST_TOKENS].float() for rows in _batched(product.y, vectors.shape[0], tokens))

    @cached_property
    def _attention(self) -> nn.Module | None:
        return next((module for module in self.call.modules if any(True for _ in module.parameters())), None)

    def _gains(self, vectors: Vectors) -> list[Gain]:
        """List the gains a norm inside the attention module may have: those known to have come into these vectors.

        Gains are all alike at the start of a training, so their numbers do not tell which one it was, nor whether there
        was any. Where nothing is known to have come in, it may be any of them, or none.
        """
        inside = set() if self._attention is None else {id(one) for one in self._attention.parameters()}
        known = self.watch.came_into(self.call.query if vectors is self.query else self.call.key)
        names = [
            name
            for name, (module, attribute) in self.tensors.owners.items()
            if attribute != "bias" and id(module._parameters.get(attribute)) in inside
            if _is_gain(self.tensors.shape(name), *vectors.shape[-2:])
        ]
        used = [name for name in names if name in known]
        gains = [self._gain(name) for name in used or names]
        less_one = [replace(gain, values=gain.values + 1, plus_one=True) for gain in gains]
        return [*([] if used else [Gain(None, torch.ones(1))]), *gains, *less_one]

    def _gain(self, name: str) -> Gain:
        bias = module_of_row(Attention("decoder", "", ""), self.tensors).bias(module_of(name))
        values = self.tensors.read(name).detach().float().flatten()
        return Gain(module_of(name), values, None if bias is None else bias.detach().float().flatten())

    def _epsilons(self) -> list[float]:
        """List epsilons: those that the attention module's parts state, then the usual ones."""
        finest, stated = torch.finfo(self.call.query.dtype).eps, []
        for module in [] if self._attention is None else self._attention.modules():
            values = (getattr(module, word, None) for word in ("eps", "variance_epsilon"))
            stated += [value for value in values if isinstance(value, float)]
            stated += [finest] if isinstance(module, nn.RMSNorm) and module.eps is None else []
        return [*dict.fromkeys([*stated, *EPSILONS, finest])]

    def _row(self, query: Made, key: Made, rotary: Rotary | None, where: Reach) -> Attention:
        starts = tuple(dict.fromkeys(key.side.starts))
        times = len(key.side.starts) // len(starts)
        if len(query.side.starts) % len(starts) or key.side.starts != tuple(s for s in starts for _ in range(times)):
            raise refusal("query heads in equal groups, one behind the other, each with one key head", key.side.starts)
        is_cross = query.product.x.shape != key.product.x.shape or not torch.equal(query.product.x, key.product.x)
        input_norm = self._input_norm(query.product.x)
        return Attention(
            block="cross" if is_cross else "decoder" if where.lookahead == 0 else "encoder",
            query=query.product.name,
            key=key.product.name,
            layers=1,
            heads=len(query.side.starts),
            key_heads=len(starts),
            d_model=query.product.x.shape[-1],
            d_head=self.query.shape[-1],
            fused=_fused(query, key, starts),
            transposed=self._transposed(query.product, key.product),
            prefixes=("",),
            input_norm=input_norm,
            key_input_norm=self._input_norm(key.product.x) if is_cross else None,
            query_norm=_norm_at(query.side.norm),
            key_norm=_norm_at(key.side.norm),
            norm_over=_over(query.side.norm, key.side.norm),
            rotary=rotary,
            turns_first=query.behind is not None,
            alibi=where.alibi,
            scale=query.side.factor * key.side.factor * self.call.scaling,
            softcap=self.call.softcap,
            lookback=None if is_cross else where.lookback,
            lookahead=None if is_cross else where.lookahead,
        )

    def _transposed(self, *products: Product) -> bool:
        """Tell whether the weights are stored as (in, out)."""
        found = {_is_transposed(product, self.tensors, 10 * self.allowed) for product in products}
        if len(found) > 1:
            raise refusal("query and key weights stored the same way", "one of them transposed")
        return found.pop()

    def _input_norm(self, x: Tensor) -> NormAt | None:
        """The norm whose output the projection was given, if it was one and its numbers can be made again."""
        for norm in reversed(self.watch.norms):
            if norm.y is x or (norm.y.shape == x.shape and torch.equal(norm.y, x)):
                return _module_norm(norm, 10 * self.allowed)
        return None

    def _prove(self, row: Attention, query: Made, key: Made) -> None:
        """The heads of the row, computed in float64, give the logits of the call again, to the call's own precision."""
        layer = read_heads(module_of_row(row, self.tensors))
        if layer.refused:
            raise Refusal(layer.refused[0])
        batch, call = self.call.query.shape[0], self.call
        sides = ((query.product.x, call.query.shape[2]), (key.product.x, call.key.shape[2]))
        x_query, x_key = (next(_batched(x, batch, tokens))[:1, :MOST_TOKENS].double() for x, tokens in sides)
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


def _batched(tensor: Tensor, batch: int, tokens: int) -> Iterator[Tensor]:
    """(batch, tokens, rows), whichever of the two came first, or whether they were one."""
    width = tensor.shape[-1]
    if tensor.shape[:-1].numel() != batch * tokens:
        return
    sequence_first = tensor.dim() == 3 and tuple(tensor.shape[:2]) == (tokens, batch) and batch != tokens
    if not sequence_first:
        yield tensor.reshape(batch, tokens, width)
    if batch > 1 or sequence_first:
        yield tensor.reshape(tokens, batch, width).transpose(0, 1)


def _fused(query: Made, key: Made, key_starts: tuple[int, ...]) -> Starts | None:
    """None for two tensors, each with its heads in order and nothing else."""
    size = query.plain.shape[-1]
    sides = ((query.product, query.side.starts), (key.product, key_starts))
    plain = all(
        starts == tuple(range(0, size * len(starts), size)) and product.y.shape[-1] == size * len(starts)
        for product, starts in sides
    )
    return None if plain and query.product.name != key.product.name else Starts(query.side.starts, key_starts)


def _is_transposed(product: Product, tensors: ModuleTensors, allowed: float) -> bool:
    """Tell whether the weight is stored as (in, out): by its shape, and by the numbers of two tokens."""
    module = module_of_row(Attention("decoder", product.name, product.name), tensors)
    weight, bias = module.weight(product.name).detach().float(), module.bias(product.name)
    x, y = (part.flatten(0, -2)[:2].float() for part in (product.x, product.y))
    y = y if bias is None else y - bias.detach().float()
    for transposed in (False, True):
        matrix = weight.T if transposed else weight
        if matrix.shape == (y.shape[-1], x.shape[-1]) and alike(x @ matrix.T, y, allowed):
            return transposed
    raise refusal(f"`{product.name}` as W x + b, with the bias stored beside the weight", "another map")


def _norm_at(norm: HeadNorm | None) -> NormAt | None:
    if norm is None:
        return None
    gain = norm.gain or ""
    return NormAt(norm.kind, gain, epsilon=norm.epsilon, plus_one=norm.plus_one, plain=norm.gain is None)


def _over(*norms: HeadNorm | None) -> Literal["head", "projection"]:
    whole = {norm.whole for norm in norms if norm is not None}
    if len(whole) > 1:
        raise refusal("one kind of QK-norm for queries and keys", "one over each head and one over all")
    return "projection" if whole == {True} else "head"


def _module_norm(norm: Normed, allowed: float) -> NormAt | None:
    """A module's norm as the tables write it; None where its numbers are not those of a norm that they know."""
    gain, bias = (getattr(norm.module, name, None) for name in ("weight", "bias"))
    stated = getattr(norm.module, "eps", getattr(norm.module, "variance_epsilon", None))
    bias = None if bias is None else bias.detach().float()
    for epsilon in (stated,) if isinstance(stated, float) else (*EPSILONS, torch.finfo(norm.x.dtype).eps):
        for plus_one in (False, True):
            scaled = None if gain is None else gain.detach().float() + plus_one
            for kind in ("rms", "layer"):
                if alike(Norm(kind, scaled, bias, epsilon)(norm.x.float()), norm.y.float(), allowed):
                    return NormAt(kind, norm.name, epsilon=epsilon, plus_one=plus_one, plain=gain is None)
    return None
