"""Record of one forward pass: which products with parameters and which norms come before attention."""

import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...attention.capture import Follow, Hook
from .tensors import ModuleTensors, named_modules

Sample = Tensor | Mapping[str, Any] | Sequence[Any]
PRODUCTS = (functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
TANH = (torch.tanh, Tensor.tanh, functional.tanh)
OF_PAIRS = (*PRODUCTS[1:4], torch.bmm, Tensor.bmm)  # by which queries meet keys where attention is written out
# Stabilisers take heads themselves; what reads a model takes them with it.
BY_NAME = "name the projections by heads=[…] (an argument of stabilisers, and of locater.Live(model, heads=[…]))"


@dataclass(frozen=True, eq=False)
class Product:
    """y = W x + b as it happened: the name under which the tables find W, and the two tensors."""

    name: str
    x: Tensor
    y: Tensor


@dataclass(frozen=True, eq=False)
class Normed:
    """The input and output of a module that may be a norm."""

    name: str
    module: nn.Module
    x: Tensor
    y: Tensor


@dataclass(eq=False)
class QueryKeyProduct:
    """A product of two computed tensors, which may be queries and keys."""

    query: Tensor
    key: Tensor
    y: Tensor
    is_capped: bool = False  # whether something of its size went through tanh since


@dataclass
class PassRecord:
    """Products since the last attention call; norms of the whole pass, since a decoder reads an encoder's last one.

    Products may be of modules, or with a parameter that no module of its own applies, such as `x @ self.w_query`.
    """

    tensors: ModuleTensors
    products: list[Product] = field(default_factory=list)
    scores: list[QueryKeyProduct] = field(default_factory=list)
    norms: list[Normed] = field(default_factory=list)
    marks: dict[int, tuple[Tensor, frozenset[str]]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # of parameters, by where they lie during the pass

    @contextmanager
    def recording(self) -> Iterator[Follow]:
        """Hooks on everything that holds a weight, for as long as this lasts; yield what the interception must tell."""
        for name, (module, attribute) in self.tensors.owners.items():
            stored = module._parameters.get(attribute)
            if stored is not None and (stored.dim() <= 2 or stored.numel() == max(stored.shape)):
                self.names[stored.data_ptr()] = name
        with ExitStack() as stack:
            for name, module in named_modules(self.tensors.model).items():
                if f"{name}.weight".lstrip(".") in self.tensors.names or may_be_norm(module):
                    stack.callback(module.register_forward_hook(partial(self._see, name)).remove)
            yield self.follow

    def _see(self, name: str, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        """One call of a module."""
        weight = f"{name}.weight".lstrip(".")
        if not (inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor)):
            return
        if weight in self.tensors.names and inputs[0].is_floating_point() and len(self.tensors.shape(weight)) == 2:
            self._add(Product(name, inputs[0], output))
        elif may_be_norm(module) and output.shape == inputs[0].shape:
            self.norms.append(Normed(name, module, inputs[0], output))

    def follow(self, func: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """One operation of the pass."""
        if func in PRODUCTS and len(args) > 1 and all(isinstance(part, Tensor) for part in args[:2]):
            name = self.names.get(args[1].data_ptr())
            if name is not None and args[1].dim() == 2:
                self._add(Product(module_of(name), args[0], output))
        if (scores := _scores(func, args, output)) is not None:
            self.scores.append(scores)
        for one in self.scores if func in TANH else ():
            one.is_capped |= one.y.numel() == output.numel()
        # Without the names of what came in, a gain that is 1 at the start of a training could not be told from none.
        names = frozenset()
        for one in (part for given in (*args, *kwargs.values()) for part in _several(given)):
            if isinstance(one, nn.Parameter) and one.data_ptr() in self.names:
                names |= {self.names[one.data_ptr()]}
            elif isinstance(one, Tensor):
                names |= self.came_into(one)
        if names:  # the tensors are held, so that no other takes their id
            self.marks |= {id(one): (one, names) for one in _several(output) if isinstance(one, Tensor)}

    def _add(self, product: Product) -> None:
        """A module's own product comes in place of the one that was seen inside it."""
        self.products = [one for one in self.products if one.y is not product.y] + [product]

    def came_into(self, tensor: Tensor) -> frozenset[str]:
        """The parameters that this tensor was computed from since the last attention call, as far as that is seen."""
        return self.marks[id(tensor)][1] if id(tensor) in self.marks else frozenset()

    def is_changed(self, name: str, parameter: Tensor) -> bool:
        """Tell whether a small parameter was put through a function, such as exp, before it was used.

        Without this a scale exp(s) that is 1 now would be taken for s itself, or for none.
        """
        own = parameter.data_ptr()
        made = (one for one, names in self.marks.values() if names == {name} and one.numel() == parameter.numel())
        return any(one.data_ptr() != own and one.dtype == parameter.dtype for one in made)

    def copy(self) -> "PassRecord":
        """Copy it for a call that is explained later."""
        return PassRecord(self.tensors, [*self.products], [*self.scores], [*self.norms], {**self.marks})

    def next_call(self) -> None:
        """Begin the record of another attention."""
        self.products.clear()
        self.scores.clear()
        self.marks.clear()


def may_be_norm(module: nn.Module) -> bool:
    """Tell by its class, or because it holds nothing but a number for each feature: people have names of their own."""
    own = [parameter.dim() for parameter in module.parameters()]
    return "norm" in type(module).__name__.lower() or (bool(own) and {*own} == {1} and not any(module.children()))


def _several(given: Any) -> Any:
    return given if isinstance(given, list | tuple) else [given]


def run_sample(model: nn.Module, sample: Sample) -> None:
    """One batch as the model takes it: a tensor, named arguments, or several."""
    if isinstance(sample, Mapping):
        model(**sample)
    elif isinstance(sample, Tensor):
        model(sample)
    else:
        model(*sample)


_LOCAL = threading.local()


def is_unwatched() -> bool:
    """Tell whether a pass under way in this thread is ours, in which heads are found, and not the training's."""
    return getattr(_LOCAL, "is_unwatched", False)


@contextmanager
def unwatched() -> Iterator[None]:
    """No monitor sees the passes that run meanwhile."""
    before, _LOCAL.is_unwatched = is_unwatched(), True
    try:
        yield
    finally:
        _LOCAL.is_unwatched = before


@contextmanager
def quietly(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, random numbers set aside, seen by no monitor: all undone."""
    modes = {module: module.training for module in model.modules()}
    with ExitStack() as stack:
        stack.enter_context(unwatched())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(lambda: [setattr(module, "training", mode) for module, mode in modes.items()])
        for module in modes:
            module.training = False
        yield


def _scores(func: Any, args: tuple, output: Any) -> QueryKeyProduct | None:
    """A product over one dimension of two tensors with the same others before their tokens; None for any other."""
    if func in OF_PAIRS and output.dim() > 2 and len(args) > 1:
        return QueryKeyProduct(args[0], args[1].mT, output)
    if func is not torch.einsum or len(args) != 3 or output.dim() < 3:
        return None
    names, _, result = args[0].replace(" ", "").partition("->")
    if not result.isalpha() or not names.replace(",", "").isalpha():
        return None
    *before, row, column = result
    for query, key in itertools.permutations(zip(names.split(","), args[1:], strict=False), 2):
        (summed,) = {*query[0]} - {*result} if len({*query[0]} - {*result}) == 1 else " "
        wanted = ((query, [*before, row, summed]), (key, [*before, column, summed]))
        if all(sorted(part[0]) == sorted(order) for part, order in wanted):
            sides = [part[1].permute(*map(part[0].index, order)) for part, order in wanted]
            return QueryKeyProduct(sides[0], sides[1], output)
    return None


def module_of(name: str) -> str:
    """The name to which the tables add `.weight` or `_weight`."""
    return name.removesuffix(".weight").removesuffix("_weight")


# ------------------------------------------------------------------------------------------------------- the first call
class FirstCall:
    """Gives the arguments of the model's next call to `use`, once, before the call itself runs.

    What `use` runs of the model is over before the call begins, for other wrappers' hooks too.
    """

    def __init__(self, entry: nn.Module, use: Callable[[Sample], None]) -> None:
        self.use: Callable[[Sample], None] | None = use
        come = weakref.WeakMethod(self._come)  # who waits is not kept alive by the model

        def tell(own: Callable[[], Any], module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
            if (waiting := come()) is not None and not is_unwatched():  # another's trial is not the call
                waiting(module, args, kwargs)

        disabled: Any = torch.compiler.disable(tell)
        self.handle = entry.register_forward_pre_hook(Hook(entry, disabled), prepend=True, with_kwargs=True)

    def _come(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        use = self.use
        self.close()
        if use is not None:
            use(_as_sample(module, args, kwargs))

    def close(self) -> None:
        self.use = None
        self.handle.remove()


def _as_sample(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> Sample:
    """A call's arguments by name, as far as the signature names them."""
    if not kwargs:
        return args
    parameters = inspect.signature(module.forward).parameters.values()
    names = [one.name for one in parameters if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return {**dict(zip(names, args, strict=False)), **kwargs}
