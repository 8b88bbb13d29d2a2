"""One pass of a model under observation: its kernels' calls are intercepted, its modules' inputs come by.

The hooks change nothing, hold nothing after the pass, and belong to one thread's pass each.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..attention.calls import AttentionCall, in_backward
from ..attention.capture import Hook, first_argument
from ..attention.compilation import Eagerly, in_compiled, in_shape_inference
from ..attention.gates import Trails
from ..attention.interception import Interception
from ..attention.outside import OutsideHook
from ..errors import missing
from ..models.module import PACKED, AttentionModule
from ..projections import whole
from .inputs import Inputs, arguments, has_cached_keys
from .tally import Mode


class Observer(Protocol):
    """Receiver of what a pass shows."""

    def is_due(self) -> bool: ...
    def recording(self) -> AbstractContextManager[None]: ...
    def written_out(self, call: AttentionCall) -> None: ...
    def by_call(
        self, site: AttentionModule | None, call: AttentionCall, inputs: Inputs | None, run: "Pass"
    ) -> bool: ...
    def by_inputs(self, site: AttentionModule, inputs: Inputs, run: "Pass") -> None: ...


@dataclass
class Owner:
    """An attention module and the sites it serves: several where layers share it."""

    module: nn.Module
    sites: list[AttentionModule] = field(default_factory=list)


@dataclass
class Pass:
    """A forward pass under way: the model's own arguments, the modules that are running, how often each has run."""

    given: dict[str, Any]
    has_cached_keys: bool
    mode: Mode = "training"
    running: dict[str, Inputs] = field(default_factory=dict)
    num_runs: Counter[str] = field(default_factory=Counter)
    current: dict[str, AttentionModule] = field(
        default_factory=dict
    )  # of an owner of several sites, whose projection ran last
    num_calls: Counter[str] = field(default_factory=Counter)  # of modules that no site names
    modes: ExitStack = field(default_factory=ExitStack)
    trails: Trails = field(default_factory=Trails)  # of the outputs, to their output projections


def mode_of(module: nn.Module) -> Mode:
    """Classify a pass as it begins: within, recomputation of activations may switch gradients off."""
    return "evaluation" if not module.training else "training" if torch.is_grad_enabled() else "no_grad"


class Hooks:
    """Attached for as long as `handles` are kept. A pass that is due is intercepted from its first to its last line.

    A pass is counted once: what runs forward within backward is recomputed, and not looked at.
    """

    def __init__(
        self, entry: nn.Module, modules: dict[str, nn.Module], sites: Iterable[AttentionModule], observer: Observer
    ):
        self.observer, self.modules, self.entry = observer, modules, entry
        self.local = threading.local()
        self.num_observing, self.num_cached, self.num_passes, self.was_called = 0, 0, 0, False
        self.outside: set[str] = set()  # attention modules that ran outside of every pass
        self.handles: list[RemovableHandle] = []
        self.owners: dict[str, Owner] = {}
        for site in sites:
            name = site.owner
            if name not in modules:
                raise missing(f"a module `{name}` around the queries of layer {site.number}")
            self.owners.setdefault(name, Owner(modules[name])).sites.append(site)
        self.owner_names = {id(owner.module): name for name, owner in self.owners.items()}
        self._register(entry)

    def _register(self, entry: nn.Module) -> None:
        keep = self.handles.append
        entries = [entry, *_encoders(entry, self.modules)]
        self.passing = [OutsideHook(one, self._begin_pass) for one in entries]
        for one, hook in zip(entries, self.passing, strict=True):
            keep(one.register_forward_pre_hook(hook, with_kwargs=True))  # type: ignore[arg-type]
        for name, owner in self.owners.items():
            self._hook(owner.module, self._begin(name), name)
            keep(owner.module.register_forward_hook(Hook(owner.module, self._while_observing(self._end(name)))))
            sides: dict[str, dict[str, list[AttentionModule]]] = defaultdict(lambda: defaultdict(list))
            for site in owner.sites:
                sides[site.query_name]["x_query"].append(site)
                sides[site.key_name]["x_key"].append(site)
            for projection, attributes in sides.items():
                if projection in self.modules and not projection.endswith(PACKED):
                    self._hook(self.modules[projection], self._capture(name, attributes))
        # The last of all: the model itself may be the attention module, whose run must end before the pass does.
        for one in entries:
            keep(one.register_forward_hook(OutsideHook(one, self._end_pass), always_call=True))  # type: ignore

    def _hook(self, module: nn.Module, function: Callable[..., None], owner: str = "") -> None:
        hook = Hook(module, self._while_observing(function, owner))
        self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _while_observing(self, function: Callable[..., None], owner: str = "") -> Callable[..., None]:
        """A compiled model sees one number to compare, and no graph breaks: passes that are observed run eagerly."""

        def hook(own: Any, module: nn.Module, *given: Any) -> None:
            if self.num_observing and own() is module and (run := self._pass()) is not None:
                function(run, module, *given)
            elif owner and not torch.compiler.is_compiling() and own() is module and self._is_outside():
                self.outside.add(owner)

        return hook

    def _is_outside(self) -> bool:
        """Tell whether a step is watched, and no call of the model itself is under way."""
        return not self._passes() and self.observer.is_due() and not in_backward()

    def unseen(self) -> Iterator[str]:
        """Passes in a full graph, which cannot be left for a look."""
        if any(hook.is_swallowed for hook in self.passing):
            yield (
                "passes in a graph compiled with fullgraph=True are not looked at: attach to what torch.compile "
                "returned, AttentionMonitor(compiled, …)"
            )

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _passes(self) -> list[Pass | None]:
        if not hasattr(self.local, "passes"):
            self.local.passes = []
        return self.local.passes

    def _pass(self) -> Pass | None:
        passes = self._passes()
        return passes[-1] if passes else None

    def _begin_pass(self, own: Any, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if own() is not module:
            return
        run, passes = None, self._passes()
        if passes and module is not self.entry:  # an encoder within its model's own pass
            run = passes[-1]
        elif not any(passes) and not in_backward() and self.observer.is_due() and not self._is_left_out():
            given = arguments(module, args, kwargs)
            run = Pass(given, has_cached_keys(given), mode_of(module))
            run.modes.enter_context(Eagerly(within_compiled=in_compiled()))
            run.modes.enter_context(self.observer.recording())
            seeing = Interception(lambda call: self._call(run, call), written_out=True, trails=run.trails)
            run.modes.enter_context(seeing)
            self.num_observing += 1
            self.num_passes += 1
        passes.append(run)

    def _is_left_out(self) -> bool:
        """A model that is compiled around these hooks compiles in its first pass: run as written, it never would."""
        is_first, self.was_called = not self.was_called, True
        return in_shape_inference() or (is_first and in_compiled())

    def _end_pass(self, own: Any, module: nn.Module, args: tuple, output: object) -> None:
        if own() is not module or not (passes := self._passes()):
            return
        run = passes.pop()
        if run is not None and not any(one is run for one in passes):
            self.num_observing -= 1
            run.modes.close()
            run.trails.close()

    def _begin(self, name: str) -> Callable[..., None]:
        def begin(run: Pass, module: nn.Module, args: tuple, kwargs: dict[str, object]) -> None:
            config = getattr(module, "config", None)
            is_flash = "flash" in str(getattr(config, "_attn_implementation", ""))
            run.running[name] = inputs = Inputs(arguments(module, args, kwargs), is_flash)
            if isinstance(module, nn.MultiheadAttention):
                _unpack(inputs, module)

        return begin

    def _capture(self, name: str, attributes: dict[str, list[AttentionModule]]) -> Callable[..., None]:
        served = [site for sites in attributes.values() for site in sites]

        def capture(run: Pass, module: nn.Module, args: tuple, kwargs: dict[str, object]) -> None:
            given = first_argument(args, kwargs)
            if name in run.running and isinstance(given, Tensor):
                if len({id(site) for site in served}) == 1 and run.current.get(name) is not served[0]:
                    self._turn(run, name, served[0])
                for attribute in attributes:
                    setattr(run.running[name], attribute, whole(given.detach()))

        return capture

    def _turn(self, run: Pass, name: str, site: AttentionModule) -> None:
        """A module with the projections of several layers goes on to another one."""
        if name in run.current:
            self._finish(run, run.current[name], run.running[name])
            run.running[name] = Inputs(run.running[name].given, run.running[name].is_flash)
        run.current[name] = site

    def _end(self, name: str) -> Callable[..., None]:
        def end(run: Pass, module: nn.Module, args: tuple, output: object) -> None:
            inputs = run.running.pop(name, None)
            site = self._site(run, name)
            run.num_runs[name] += 1
            run.current.pop(name, None)
            if inputs is not None:
                self._finish(run, site, inputs)

        return end

    def _finish(self, run: Pass, site: AttentionModule, inputs: Inputs) -> None:
        """Reconstruct the attention that no kernel was seen to compute."""
        if inputs.was_seen or inputs.x_query is None or inputs.x_key is None:
            return
        if site.block != "cross" and run.has_cached_keys:
            self.num_cached += 1
        else:
            self.observer.by_inputs(site, inputs, run)

    def _site(self, run: Pass, name: str) -> AttentionModule:
        """Name the site: where layers share a module and its projections, by the index of this call."""
        sites = self.owners[name].sites
        return run.current.get(name) or sites[run.num_runs[name] % len(sites)]

    def _call(self, run: Pass, call: AttentionCall) -> None:
        """A kernel was called: whose layer is it, and was that not seen already?"""
        name = next((self.owner_names[id(one)] for one in call.modules if id(one) in self.owner_names), None)
        if name is None:
            if not self.owners and call.logits is None:
                self.observer.by_call(None, call, None, run)
            elif not self.owners:
                self.observer.written_out(call)
            return
        inputs = run.running.get(name)
        if call.logits is not None and (inputs is None or inputs.was_seen):
            return  # some other softmax: a router's, a pooling's
        was_seen = self.observer.by_call(self._site(run, name), call, inputs, run)
        if (was_seen or call.is_share) and inputs is not None:  # of a share, inputs would tell no more
            inputs.was_seen = True


def _encoders(entry: nn.Module, modules: dict[str, nn.Module]) -> list[nn.Module]:
    """List the encoders that `generate` of transformers calls directly, and not by way of the model."""
    ask = getattr(entry, "get_encoder", None)
    try:
        found = ask() if callable(ask) else None
    except Exception:  # a model of another library may mean anything by it
        return []
    inside = isinstance(found, nn.Module) and found is not entry and any(one is found for one in modules.values())
    return [found] if inside and isinstance(found, nn.Module) else []


def _unpack(inputs: Inputs, module: nn.MultiheadAttention) -> None:
    """torch's own module: texts first."""
    if not all(isinstance(inputs.given.get(side), Tensor) for side in ("query", "key")):
        return
    x_query, x_key = inputs.given["query"].detach(), inputs.given["key"].detach()
    if x_query.dim() == 2:
        x_query, x_key = x_query[None], x_key[None]
    elif not module.batch_first:
        x_query, x_key = x_query.transpose(0, 1), x_key.transpose(0, 1)
    inputs.x_query, inputs.x_key = x_query, x_key
