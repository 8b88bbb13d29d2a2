"""Heads found by themselves: one forward pass shows which parameters make the queries and keys of each attention call.

What cannot be explained is refused with the step that could not. And heads that are known, held against a call.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ...attention.arguments import read_arguments
from ...attention.call_statistics import mask_of_call
from ...attention.calls import AttentionCall
from ...attention.capture import Follow
from ...attention.compilation import Eagerly
from ...attention.interception import Interception
from ...errors import Refusal, missing, refusal, within
from ...head import Head
from ...projections import Norm, whole, widen
from ..module import AttentionModule, module_of_row, refused_module
from .explain import batched, tolerance
from .logits import largest_gap
from .proving import Search
from .tensors import ModuleTensors, called, named_modules
from .watch import BY_NAME, PassRecord, Sample, quietly, run_sample


def discover(model: nn.Module, sample: Sample, tensors: ModuleTensors | None = None) -> list[AttentionModule]:
    """An attention module for every attention call of the pass, each parameter once; or why it cannot be read.

    The pass runs in evaluation mode, without gradients and outside of compiled code, and changes nothing in the model.
    """
    finder = Finder(tensors or ModuleTensors(model))
    rows = finder.over(sample)
    if not rows:
        kind = type(finder.tensors.model).__name__
        raise missing(f"attention in one pass of {kind} over the sample", BY_NAME)
    # Each attention once, however often it was called.
    return list({(name, found.query_name, found.row.fused): found for name, found in rows}.values())


class Finder:
    """Explains every attention call of a pass by what was recorded since the one before."""

    def __init__(self, tensors: ModuleTensors) -> None:
        self.tensors, self.watch = tensors, PassRecord(tensors)
        # The modules are held: one that is replaced during a pass (BigBird's) would leave its id to another.
        self.modules = named_modules(tensors.model)
        self.names = {id(module): name for name, module in self.modules.items()}

    def over(self, sample: Sample) -> list[tuple[str, AttentionModule]]:
        """Every attention of one pass over a batch, in the order of the calls, with the name of the calling module."""
        rows: list[tuple[str, AttentionModule | None]] = []
        self.run(sample, lambda call: rows.append((self.name_of(call), self.explain(call))))
        return [(name, found) for name, found in rows if found is not None]

    def run(self, sample: Sample, see: Callable[[AttentionCall], None]) -> None:
        """One recorded pass, in evaluation mode, without gradients and outside of compiled code."""
        model = called(self.tensors.given)
        with Eagerly(), quietly(model), self.recording() as follow, Interception(see, written_out=True, follow=follow):
            run_sample(model, sample)

    @contextmanager
    def recording(self) -> Iterator[Follow]:
        """Record one pass, which is forgotten at its end."""
        with self.watch.recording() as follow:
            yield follow
        self.watch = PassRecord(self.tensors)

    def explain(self, call: AttentionCall) -> AttentionModule | None:
        """The attention module of a call, or why there is none; None where it is a softmax of something else."""
        if not self.may_be_attention(call):
            return None
        found = self.explained(call)
        self.watch.next_call()  # else an earlier layer's products, equal at the start of a training, would be taken
        return found

    def may_be_attention(self, call: AttentionCall) -> bool:
        """Tell whether a softmax that was written out is over pairs of tokens, after products with parameters."""
        return call.logits is None or (call.logits.dim() == 4 and bool(self.watch.products))

    def name_of(self, call: AttentionCall) -> str:
        """The innermost of the model's modules that was running."""
        return next((self.names[id(module)] for module in call.modules if id(module) in self.names), "")

    def explained(self, call: AttentionCall, watch: PassRecord | None = None) -> AttentionModule:
        """The attention module of a call by what was recorded since the last one, or why it cannot be read."""
        name = self.name_of(call)
        try:
            with (
                within(name or type(self.tensors.model).__name__),
                torch._C.DisableTorchFunction(),
                torch.no_grad(),
                torch.autocast(call.query.device.type, enabled=False),
            ):
                search = Search(call, watch or self.watch, self.tensors)
                return replace(module_of_row(search.row(), self.tensors), caller=name, otherwise=search.otherwise)
        except Refusal as reason:
            return refused_module("decoder", (name, name), str(reason))


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
    device = call.query.device.type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else call.query.dtype
    with torch.autocast(device, enabled=False):
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
        kinds = (x_query.dtype, heads[0].query.weight.dtype, call.query.dtype, cast)
        eps = max(torch.finfo(kind).eps for kind in kinds)
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
        if not bool(admitted[:, row].any()):
            raise missing(f"keys that a query of head {head.index} may see")
        largest = float(theirs[:, row][admitted[:, row]].abs().max())
        error = largest_gap(head, head.logits(*inputs, positions), theirs[:, row], admitted[:, row])  # type: ignore
        if not error <= allowed * max(largest, _reach(head, inputs)):
            return f"head {head.index} has other logits, by {error:.2g} where the largest is {largest:.3g}"
    return None


def _other_mask(head: Head, seen: Bool[Tensor, "texts queries keys"], positions: tuple[Tensor, ...]) -> str | None:
    """Describe how the call's mask differs: a key beyond the head's reach, or one within it that a query does not see.

    Padding is ignored: keys that no query sees, and queries that see nothing.
    """
    admits = head.admits(*positions)
    if bool((seen & ~admits).any()):
        return "is shown keys that it should not see"
    lost = (admits & seen.any(-1, keepdim=True) & seen.any(-2, keepdim=True) & ~seen).any(0)
    distances = (positions[0][:, None] - positions[1])[lost].tolist()
    return f"is not shown some keys at a distance of {min(distances, key=abs)}" if distances else None


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
    logits = call.changed(query=query, key=key).raw()
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
