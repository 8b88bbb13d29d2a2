"""A model before anything of it is read: a stored checkpoint or a live module, opened to its layers; and its heads."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from os import fspath

from .. import checkpoints
from ..budget import end_of, limited
from ..errors import Refusal, net, refusal
from ..head import Head
from ..models import (
    AttentionModule,
    Config,
    Family,
    HeadRows,
    open_model,
    read_heads,
    read_layout,
    slices,
    wanted_layers,
)
from ..models.coverage import Coverage
from ..models.sources import Live, Source, Stored, as_source
from ..models.tensors import Tensors


@dataclass(frozen=True)
class OpenedModel:
    """A model of which nothing is read yet, with its attention modules."""

    source: str
    family: str
    format: str
    coverage: Callable[[], Coverage]  # what of a live model differs from its config costs building that once more
    numbers: Sequence[int]  # the layers of its attention modules
    modules: Callable[[frozenset[int]], Sequence[AttentionModule]]  # those of some layers
    num_layers: int  # of the whole model, stored here or not
    tensors: Tensors | None = None  # all of its tensors by name, where they have the names of a family
    config: Config = field(default_factory=Config)

    def wanted(self, layers: Iterable[int] | None) -> Sequence[AttentionModule]:
        """The attention modules of the layers asked for; refused where the model has no such layer."""
        return self.modules(wanted_layers(layers, self.numbers))


@contextmanager
def open_source(source: Stored | Live) -> Iterator[OpenedModel]:
    """Open a model to its layers, by the options of its kind."""
    if isinstance(source, Live) and source.causal is not None:
        raise refusal("no causal=… but for `predict`", source.causal, "weights do not depend on the mask")
    with net(fspath(source.layout or "")):
        family = None if source.layout is None else read_layout(source.layout)
    if isinstance(source, Live):
        yield _open_live(source, family)
        return
    with nullcontext() if source.timeout is None else limited(seconds=source.timeout):
        with net(source.name):
            checkpoint = checkpoints.open(source.place, adapter=source.adapter, allow_pickle=source.allow_pickle)
        with checkpoint:
            with net(source.name):
                config = Config(checkpoint.config)
                model = open_model(config, checkpoint, family=family)
                numbers = [module.number for module in model.modules()]
            facts = source.name, model.family, checkpoint.format, lambda: model.coverage
            yield OpenedModel(*facts, numbers, model.modules, model.num_layers, checkpoint, config)


def heads(source: Source, *, layers: Iterable[int] | None = None) -> Iterator[Head]:
    """Every head of a checkpoint (directory, file, hub id, address) or a live module, one layer's weights at a time.

    Heads of a live module are views of its parameters. Options of reading go with the source: `locater.Stored` for
    files, `locater.Live` for modules, such as `heads(Live(model, sample=batch))` of a module of no known family.

    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32)
    >>> [head.label for head in heads(layer)]
    ['encoder layer 0, head 0', 'encoder layer 0, head 1']
    """
    source = as_source(source)
    end = end_of(source.timeout) if isinstance(source, Stored) else None
    source = replace(source, timeout=None) if isinstance(source, Stored) else source
    with ExitStack() as stack:
        with limited(deadline=end):
            opened = stack.enter_context(open_source(source))
            chosen = opened.wanted(layers)
        for module in chosen:
            with net(opened.source), limited(deadline=end):  # not in force while the caller is at work
                layer = read_heads(module)
            if layer.refused:
                raise Refusal(layer.refused[0])
            yield from layer.heads
            del layer  # one layer's weights at a time


def head_rows(source: Source, *, layers: Iterable[int] | None = None) -> list[HeadRows]:
    """Name the rows of parameters that are each head's query, key and value; no weight is read.

    Names are those of the model's `state_dict` without what wrappers (compilation, DDP, FSDP) put before them; rows are
    those of a weight stored as (out, in), and columns where `transposed`. Sources are those of `locater.heads`. An
    optimiser that treats heads one by one takes its blocks from here, whatever the layout:

    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32)
    >>> [(rows.query.first, rows.key.first, rows.value.first) for rows in head_rows(layer)]
    [(0, 16, 32), (8, 24, 40)]
    >>> key = head_rows(layer)[1].key
    >>> key.parameter, key.of(layer.get_parameter(key.parameter)).shape
    ('self_attn.in_proj_weight', torch.Size([8, 16]))
    """
    with open_source(as_source(source)) as opened, net(opened.source):
        return [rows for module in opened.wanted(layers) for rows in slices(module)]


def _open_live(source: Live, family: Family | None) -> OpenedModel:
    from ..models import live  # stored models are read without what finds heads in live ones

    opened = live.open_live(source.module, family=family, sample=source.sample, heads=source.heads)
    numbers, tensors = [site.number for site in opened.sites], None if opened.model is None else opened.tensors

    def modules(wanted: frozenset[int]) -> list[AttentionModule]:
        return [site for site in opened.sites if site.number in wanted]

    facts = source.name, opened.family, "module", opened.coverage
    return OpenedModel(*facts, numbers, modules, opened.num_layers, tensors, opened.config)
