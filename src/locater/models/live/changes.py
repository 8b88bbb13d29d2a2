"""Differences of a live model from the code and the config by which it is read: found without running it.

The same class is built again from the same config, without storage for its weights. What then differs on the way to the
logits (classes, numbers held by modules, buffers, shapes), and whatever acts that is no part of a class (hooks, methods
replaced in an instance or a class, functions replaced in a module), is named.
"""

import copy
import functools
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.utils._python_dispatch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from ..neighbours import BEHIND, outer_modules
from .tensors import called, is_adapter, named_modules, unwrap

# Packages whose code the tables were held against, or which only wrap a module; and whose hooks leave logits alone.
KNOWN = ("torch", "transformers", "timm", "peft", "accelerate", "numpy", "safetensors", "typing_extensions")
KNOWN += (*(sys.stdlib_module_names - {"__main__"}),)
HOOKS = ("torch.distributed", "torch._dynamo", "accelerate", "transformers.utils.output_capturing")
OWN = ("locater", "locater_lab")
MODELS = "transformers.models."
WRAPPING = ("torch.distributed", "torch.nn.utils")  # classes that these make stand around the module's own
WATCHING = ("Watcher", "_Passing")  # handlers of stabilisers that leave calls as they are
HARMLESS = ("training", "gradient_checkpointing", "attention_dropout", "dropout", "dropout_p", "dropout_prob", "p")
HARMLESS += ("max_seq_len_cached", "inplace")
LENGTHENED = ("dynamic", "longrope")  # rotary kinds whose frequencies follow the longest text so far
TURNS = re.compile(r"rotary|rope", re.IGNORECASE)
MOST_NUMBERS = 2**20
COMPILED = ("__compiled_fn", "__resume_at")  # names that torch.compile adds to a module
# What computes with tensors in torch's own namespace, where others replace `compile`, `load` and the like.
COMPUTING = frozenset([*dir(torch._C._VariableFunctions), *torch.functional.__all__])  # type: ignore[attr-defined]


def changes(model: nn.Module, owners: Iterable[str], norms: Iterable[str]) -> list[str]:
    """In words, each thing found to differ in the attention modules `owners`, their norms, and what is around them."""
    found = [*_wrapped(model)]
    model = unwrap(model)
    modules = named_modules(model)
    inner = _path(modules, owners, norms)
    around = {name for one in inner for name in outer_modules(one)} - inner | {""}
    path = {name: modules[name] for name in sorted(inner | around) if name in modules}
    reference = _built_again(model)
    found += [*_other_types(model), *_stabilised(modules), *_patched(path.values())]
    for name, module in path.items():
        found += _acting(name or type(module).__name__, module)
    for name in sorted(reference.keys() & path.keys()):
        compare = _unlike if name in inner else _other_attributes
        found += compare(name or type(model).__name__, modules[name], reference[name])
    return list(dict.fromkeys(found))


def _path(modules: dict[str, nn.Module], owners: Iterable[str], norms: Iterable[str]) -> set[str]:
    """Modules on the way to logits: attention without what comes behind it, norms, rotary tables."""
    owners = set(owners)
    held = ((name, [outer for outer in outer_modules(name) if outer in owners]) for name in modules)
    inside = {name for name, by in held if by and not any(BEHIND.match(f"{name[len(outer) + 1 :]}.") for outer in by)}
    turning = {name for name, module in modules.items() if TURNS.search(type(module).__name__)}
    return owners | inside | turning | {name for name in norms if name in modules}


# ------------------------------------------------------------------------------------------ what is no part of a class
def _wrapped(model: nn.Module) -> Iterator[str]:
    """Prompts that peft has learned: keys that no projection makes."""
    for name, config in dict(getattr(called(model), "peft_config", {})).items():
        if getattr(config, "is_prompt_learning", False):
            yield f"keys of the prompts that the adapter `{name}` has learned"


def _other_types(model: nn.Module) -> Iterator[str]:
    """Yield a config that names another model type than the class has."""
    declared = getattr(getattr(model, "config", None), "model_type", None)
    own = getattr(getattr(type(model), "config_class", None), "model_type", declared)
    if own != declared:
        yield f"{type(model).__name__} is of the type {own!r}, its config of {declared!r}"


def _stabilised(modules: dict[str, nn.Module]) -> Iterator[str]:
    """Stabilisers of this package that change a call in place of looking at it."""
    for name, module in modules.items():
        for handler in getattr(module.__dict__.get("forward"), "handlers", ()):
            if type(handler).__name__ not in WATCHING:
                yield f"a stabiliser in `{name}` ({type(handler).__name__})"


def _acting(name: str, module: nn.Module) -> Iterator[str]:
    """Hooks, a foreign class, and functions held by the instance."""
    kind = _own_class(module)
    if not _is_known(kind.__module__, KNOWN):
        yield f"`{name}` is of the class {kind.__module__}.{kind.__qualname__}, which was not looked at"
    of_accelerate = vars(module).get("_hf_hook")  # its wrapper is known, the hook may be the user's
    further = [] if of_accelerate is None else getattr(of_accelerate, "hooks", (of_accelerate,))
    yield from _hooked(f"`{name}`", module._forward_pre_hooks, module._forward_hooks, dict(enumerate(further)))
    for key, tensor in module._parameters.items():
        if not _is_known(type(tensor).__module__, (*KNOWN, "builtins")):
            yield f"`{name}.{key}` is a {type(tensor).__module__}.{type(tensor).__qualname__}, which was not looked at"
    for attribute, value in vars(module).items():
        shadows = callable(value) and not isinstance(value, nn.Module | type) and hasattr(type(module), attribute)
        if shadows and not _is_its_own(module, attribute, value):
            yield f"`{name}.{attribute}` was replaced by {_called(value)}"


def _patched(modules: Iterable[nn.Module]) -> Iterator[str]:
    """Methods replaced in classes, functions in the modules that define these or in torch's, attention by own name."""
    classes = {kind for module in modules for kind in type(module).__mro__ if issubclass(kind, nn.Module)}
    known = sorted((kind for kind in classes if _is_known(kind.__module__, KNOWN)), key=str)
    homes = {kind.__module__ for kind in classes if kind.__module__.startswith(MODELS)}
    homes |= {_home(function) for _, function in _registered(modules)} & sys.modules.keys()
    places = [(kind.__qualname__, kind) for kind in (*known, Tensor)]
    places += [(home, sys.modules[home]) for home in sorted({*homes, "torch", "torch.nn.functional"})]
    for place, holder in places:
        for name, value in _functions(holder):
            if not _is_all_known(value) or _is_of_another(holder, name, value):
                yield f"{place}.{name} was replaced by {_called(value)}"
    if not isinstance(nn.functional.scaled_dot_product_attention, BuiltinFunctionType):
        yield "torch.nn.functional.scaled_dot_product_attention was replaced"
    of_all = nn.modules.module
    yield from _hooked("all modules", of_all._global_forward_pre_hooks, of_all._global_forward_hooks)
    own = ((what, value) for what, value in _registered(modules) if not _is_all_known(value))
    yield from (f"{what} is {_called(value)}" for what, value in own)


def _hooked(where: str, *hooks: Mapping[int, object]) -> Iterator[str]:
    foreign = (hook for some in hooks for hook in some.values() if not _is_known(_home(hook), HOOKS))
    yield from (f"a hook on {where} ({_called(hook)})" for hook in foreign)


def _functions(home: type | ModuleType) -> Iterator[tuple[str, object]]:
    """Everything callable in a class or module, by its name, without what the compiler leaves there for itself."""
    for name, value in vars(home).items():
        if home is torch and name not in COMPUTING:
            continue
        value = value.fget if isinstance(value, property) else value
        if callable(value) and not isinstance(value, type) and not name.startswith(COMPILED):
            yield name, value


def active_modes() -> list[str]:
    """Modes of torch that stand around a pass and are not its own or this package's: they may change any call."""
    stacks = (getattr(torch.overrides, "_get_current_function_mode_stack", list),
              getattr(torch.utils._python_dispatch, "_get_current_dispatch_mode_stack", list))  # fmt: skip
    modes = [type(mode) for stack in stacks for mode in stack()]
    return [f"the mode {kind.__qualname__} around it" for kind in modes if not _is_known(kind.__module__, KNOWN)]


def _registered(modules: Iterable[nn.Module]) -> Iterator[tuple[str, object]]:
    """Attention functions and masks that transformers has under the name that the config gives."""
    names = {getattr(getattr(module, "config", None), "_attn_implementation", None) for module in modules}
    tables = (("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS", "attention"),
              ("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS", "mask"))  # fmt: skip
    for home, table, what in tables:
        known: Any = getattr(sys.modules.get(home), table, {})
        for name in sorted(name for name in names if isinstance(name, str) and name in known):
            yield f"the {what} `{name}`", known[name]


def _chain(value: object) -> Iterator[object]:
    """A callable and all that it wraps."""
    while value is not None:
        yield value
        wrapped = getattr(value, "__wrapped__", None)
        value = value.func if isinstance(value, functools.partial) and wrapped is None else wrapped


def _is_all_known(value: object) -> bool:
    return all(_is_known(_home(part), KNOWN) for part in _chain(value))


def _is_its_own(module: nn.Module, name: str, value: object) -> bool:
    """Tell whether what an instance holds is its class's function, bound to it alone, in nothing but known wrappers."""
    parts, name = [*_chain(value)], "_call_impl" if name == "_compiled_call_impl" else name
    bound = [getattr(part, "__self__", module) for part in parts]
    for partial in (part for part in parts if isinstance(part, functools.partial)):
        bound += [*partial.args, *partial.keywords.values()]
    own = [vars(kind).get(name) for kind in type(module).__mro__]
    is_own = any(getattr(part, "__func__", part) is function for part in parts for function in own)
    return is_own and _is_all_known(value) and all(one is module for one in bound)


def _is_of_another(holder: type | ModuleType, name: str, value: object) -> bool:
    """Tell whether a class or a module holds a function of a known package that is not its own."""
    names = {getattr(part, "__qualname__", name) for part in _chain(value)}
    if isinstance(holder, type):
        is_held = name == "forward" or holder.__module__.startswith(MODELS)
        return is_held and names.isdisjoint({f"{holder.__qualname__}.{name}", "_forward_unimplemented"})
    home, own = _home(value), holder.__name__
    is_renamed = name not in names and home.partition(".")[0] in ("torch", "builtins", "transformers")
    return own.startswith(MODELS) and (is_renamed or (home.startswith(MODELS) and home != own))


def _home(value: object) -> str:
    """The module whose code a callable runs."""
    if isinstance(value, functools.partial):
        return _home(value.func)
    if isinstance(value, MethodType):
        return _home(value.__func__)
    if isinstance(value, FunctionType):
        return str(value.__globals__.get("__name__", ""))
    return type(value).__module__ if not inspect.isbuiltin(value) else "builtins"


def _called(value: object) -> str:
    function: Any = value.func if isinstance(value, functools.partial) else value
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{_home(value)}.{name}"


def _is_known(home: str, packages: Iterable[str]) -> bool:
    return any(home == package or home.startswith(f"{package}.") for package in (*OWN, *packages))


def _own_class(module: nn.Module) -> type:
    """Without what sharding and parametrisations put around it."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith(WRAPPING))


# ----------------------------------------------------------------------------------------- against the same, built anew
class _Empty(TorchFunctionMode):
    """Storage for no parameter: torch.empty, by which modules make them, gives tensors without any."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        return func(*args, **(kwargs | {"device": "meta"} if func is torch.empty else kwargs))


@contextmanager
def _silently() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        logging.disable(before)


def _built_again(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of the same class made from the same config; none where it cannot be made from that alone."""
    config = getattr(model, "config", None)
    try:
        with _silently(), _Empty():
            return {} if config is None else named_modules(type(model)(copy.deepcopy(config)))
    except Exception:  # whatever a class wants beside its config
        return {}


def _unlike(name: str, module: nn.Module, reference: nn.Module) -> Iterator[str]:
    """Class, parameters, simple attributes and buffers of one module that differ."""
    if is_adapter(module):  # the weight that it makes is read; what it wraps is compared
        module = module.base_layer  # type: ignore[assignment]
    kind, other = _own_class(module), _own_class(reference)
    if kind is not other:
        yield f"`{name}` is a {kind.__qualname__}, by the config a {other.__qualname__}"
        return
    if not parametrize.is_parametrized(module):
        shapes, others = _shapes(module), _shapes(reference)
        for key in sorted(shapes.keys() ^ others.keys()):
            yield f"`{name}.{key}` is there, by the config it is not" if key in shapes else f"`{name}.{key}` is missing"
        for key in sorted(shapes.keys() & others.keys()):
            if shapes[key] != others[key]:
                yield f"`{name}.{key}` is of {[*shapes[key]]}, by the config of {[*others[key]]}"
    yield from _other_attributes(name, module, reference)
    yield from _other_buffers(name, module, reference)


def _other_attributes(name: str, module: nn.Module, reference: nn.Module) -> Iterator[str]:
    for key, value in vars(reference).items():
        own = getattr(module, key, value)
        is_compared = not key.startswith("_") and key not in HARMLESS and _is_simple(value)
        if is_compared and _plain(own) != _plain(value):
            yield f"`{name}.{key}` is {own!r:.60}, by the config {value!r:.60}"


def _other_buffers(name: str, module: nn.Module, reference: nn.Module) -> Iterator[str]:
    for key, other in _tensors(reference).items():
        own = _tensors(module).get(key)
        if own is None or other is None or other.is_meta or own.is_meta or other.numel() > MOST_NUMBERS:
            continue
        if getattr(module, "rope_type", None) in LENGTHENED and not key.startswith("original"):
            continue
        allowed = 4 * torch.finfo(own.dtype).eps if own.is_floating_point() else 0.0
        own, other = own.detach().cpu().double(), other.detach().double()
        if own.shape != other.shape or not torch.allclose(
            own, other, rtol=max(allowed, 1e-6), atol=0.0, equal_nan=True
        ):
            yield f"`{name}.{key}` has other numbers than by the config"


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(one.shape) for name, one in module._parameters.items() if one is not None}


def _tensors(module: nn.Module) -> dict[str, Tensor | None]:
    """Buffers, and tensors that a module holds beside them."""
    return {**module._buffers, **{name: value for name, value in vars(module).items() if isinstance(value, Tensor)}}


def _is_simple(value: object) -> bool:
    """Tell whether a value is plain data, which `==` compares."""
    if isinstance(value, list | tuple):
        return all(map(_is_simple, value))
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: object) -> object:
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
