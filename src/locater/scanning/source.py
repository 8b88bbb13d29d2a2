"""A model before anything of it is read: a stored checkpoint or a live module, opened to its layers; and its heads."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from torch import nn

from .. import checkpoints
from ..budget import end_of, limited
from ..errors import Refusal, masked, net, refusal
from ..head import Head
from ..models import Config, Family, HeadRows, Layer, Model, Slices, open_model, read_layout, wanted_layers
from ..models.coverage import Coverage
from .direct import Tensors

if TYPE_CHECKING:  # stored models are read without what finds heads in live ones
    from ..models import live
    from ..models.live.explicit import Explicit

Source = str | PathLike[str] | nn.Module


@dataclass(frozen=True)
class Opened:
    """Opened source: the layer of each attention module, and a reader of the wanted ones."""

    source: str
    family: str
    format: str
    coverage: Callable[[], Coverage]  # what of a live model differs from its config costs building that once more
    numbers: list[int]
    num_layers: int  # of the whole model, stored here or not
    read: Callable[[frozenset[int]], Iterator[Layer]]
    slices: Callable[[frozenset[int]], Iterator[Slices]]
    tensors: Tensors | None = None  # all of its tensors by name, where they have the names of a family
    config: Config = field(default_factory=Config)

    def wanted(self, layers: Iterable[int] | None) -> frozenset[int]:
        """The numbers of the layers asked for; refused where the model has no such layer."""
        return wanted_layers(layers, self.numbers)


@contextmanager
def open_source(
    source: Source,
    *,
    adapter: str | PathLike[str] | None = None,
    layout: str | PathLike[str] | None = None,
    allow_pickle: bool = False,
    sample: "live.Sample | None" = None,
    heads: "Sequence[Explicit]" = (),
    timeout: float | None = None,
) -> Iterator[Opened]:
    """`adapter`, `allow_pickle` and `timeout` are for files; `sample` and `heads` for modules: see `locater.heads`."""
    with net(fspath(layout or "")):
        family = None if layout is None else read_layout(layout)
    if isinstance(source, nn.Module):
        yield _open_live(source, family, sample, heads)
        return
    if sample is not None or heads:
        raise refusal("a live module with sample=… or heads=…", "a stored one", "describe it with layout=…")
    place = masked(fspath(source))
    with nullcontext() if timeout is None else limited(seconds=timeout):
        with net(place):
            checkpoint = checkpoints.open(source, adapter=adapter, allow_pickle=allow_pickle)
        with checkpoint:
            with net(place):
                config = Config(checkpoint.config)
                opened = _of_model(open_model(config, checkpoint, family=family), place)
            yield replace(opened, format=checkpoint.format, tensors=checkpoint, config=config)


def heads(
    source: Source,
    *,
    layers: Iterable[int] | None = None,
    adapter: str | PathLike[str] | None = None,
    layout: str | PathLike[str] | None = None,
    allow_pickle: bool = False,
    sample: "live.Sample | None" = None,
    heads: "Sequence[Explicit]" = (),
    timeout: float | None = None,
) -> Iterator[Head]:
    """Every head of a checkpoint (directory, file, hub id, address) or a live module, one layer's weights at a time.

    Heads of a live module are views of its parameters. A module of no known family is run once on `sample`, a batch as
    it takes them, and its heads are found by what its attention is given; or its projections are named by `heads`, one
    entry per layer: (query, key, num_heads, num_key_heads) or (fused, num_heads, num_key_heads). `timeout` is the
    number of seconds after which files from elsewhere are given up.

    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32)
    >>> [head.label for head in heads(layer)]
    ['encoder layer 0, head 0', 'encoder layer 0, head 1']
    """
    options: dict[str, Any] = dict(
        adapter=adapter, layout=layout, allow_pickle=allow_pickle, sample=sample, heads=heads
    )
    end = end_of(timeout)
    with ExitStack() as stack:
        with limited(deadline=end):
            opened = stack.enter_context(open_source(source, **options))
            read = opened.read(opened.wanted(layers))
        while True:
            with net(opened.source), limited(deadline=end):  # not in force while the caller is at work
                layer = next(read, None)
            if layer is None:
                return
            if layer.refused:
                raise Refusal(layer.refused[0])
            yield from layer.heads
            del layer  # one layer's weights at a time


def head_rows(
    source: Source,
    *,
    layers: Iterable[int] | None = None,
    layout: str | PathLike[str] | None = None,
    allow_pickle: bool = False,
    sample: "live.Sample | None" = None,
    heads: "Sequence[Explicit]" = (),
    timeout: float | None = None,
) -> list[HeadRows]:
    """List the rows of the parameters that are each head's query, key and value; no weight is read.

    Names are those of the model's `state_dict` without what wrappers (compilation, DDP, FSDP) put before them; rows are
    those of a weight stored as (out, in), and columns where `transposed`. Sources and options are those of
    `locater.heads`. An optimiser that treats heads one by one takes its blocks from here, whatever the layout:

    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32)
    >>> [(rows.query.first, rows.key.first, rows.value.first) for rows in head_rows(layer)]
    [(0, 16, 32), (8, 24, 40)]
    >>> key = head_rows(layer)[1].key
    >>> key.parameter, key.of(layer.get_parameter(key.parameter)).shape
    ('self_attn.in_proj_weight', torch.Size([8, 16]))
    """
    options: dict[str, Any] = dict(layout=layout, allow_pickle=allow_pickle, sample=sample, heads=heads)
    with open_source(source, timeout=timeout, **options) as opened, net(opened.source):
        return [rows for module in opened.slices(opened.wanted(layers)) for rows in module.heads]


def _open_live(
    module: nn.Module, family: Family | None, sample: "live.Sample | None", heads: "Sequence[Explicit]"
) -> Opened:
    from ..models import live

    opened = live.open_live(module, family=family, sample=sample, heads=heads)

    def read(wanted: frozenset[int]) -> Iterator[Layer]:
        return (site.build() for site in opened.sites if site.number in wanted)

    def slices(wanted: frozenset[int]) -> Iterator[Slices]:
        for site in (site for site in opened.sites if site.number in wanted):
            if site.slices is None:
                raise Refusal(site.build().refused[0])
            yield site.slices()

    facts = type(module).__name__, opened.family, "module", opened.coverage
    numbers, tensors = [site.number for site in opened.sites], None if opened.model is None else opened.tensors
    return Opened(*facts, numbers, opened.num_layers, read, slices, tensors, opened.config)


def _of_model(model: Model, source: str) -> Opened:
    numbers = [layer for places in model.places for layer in places.layers]
    depth = max(places.num_layers for places in model.places)
    facts = source, model.family, "module", lambda: model.coverage
    return Opened(*facts, numbers, depth, model.layers, model.slices)
