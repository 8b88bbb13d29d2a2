"""One pass of a model under observation: its kernels' calls are intercepted, its modules' inputs come by.

The hooks change nothing, hold nothing after the pass, and belong to one thread's pass each.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle as Handle

from ..attention.calls import AttentionCall, in_backward
from ..attention.capture import Hook, first_argument
from ..attention.compilation import Eagerly, in_compiled, in_shape_inference, in_transform
from ..attention.interception import Interception
from ..attention.outside import OutsideHook
from ..errors import missing
from ..models.module import PACKED, AttentionModule
from ..projections import whole
from .inputs import ModuleInputs, WatchedPass
from .observation import Observation


class Hooks:
    """Attached for as long as `handles` are kept. A pass that is due is intercepted from its first to its last line.

    A pass is counted once: what runs forward within backward is recomputed, and not looked at.
    """

    def __init__(self, entry: nn.Module, seen: Observation):
        self.entry, self.seen, self.modules = entry, seen, seen.modules
        self.local = threading.local()
        self.num_observing, self.num_cached, self.num_passes, self.was_called = 0, 0, 0, False
        self.outside: set[str] = set()  # attention modules that ran outside of every pass
        self.was_transformed = False
        self.handles: list[Handle] = []
        self.owners: dict[str, list[AttentionModule]] = {}  # the layers that a module serves: several if they share it
        self.first_names: dict[int, str] = {}  # of modules that stand in several places, and are called in turn
        for name, module in self.modules.items():
            self.first_names.setdefault(id(module), name)
        for site in seen.sites if seen.is_known else ():
            if site.owner not in self.modules:
                raise missing(f"a module `{site.owner}` around the queries of layer {site.number}")
            self.owners.setdefault(self._first_name(site.owner), []).append(site)
        self.owner_names = {id(self.modules[name]): name for name in self.owners}
        self._register(entry)

    def _register(self, entry: nn.Module) -> None:
        keep = self.handles.append
        entries = [entry, *_encoders(entry, self.modules)]
        self.passing = [OutsideHook(one, self._begin_pass) for one in entries]
        for one, hook in zip(entries, self.passing, strict=True):
            keep(one.register_forward_pre_hook(hook, with_kwargs=True))  # type: ignore[arg-type]
        for name, sites in self.owners.items():
            owner = self.modules[name]
            begin, end = (
                self._hook(owner, partial(self._begin, name), name),
                self._hook(owner, partial(self._end, name)),
            )
            keep(owner.register_forward_pre_hook(begin, with_kwargs=True))
            keep(owner.register_forward_hook(end))
            sides: dict[str, dict[str, list[AttentionModule]]] = defaultdict(lambda: defaultdict(list))
            for site in sites:
                sides[self._first_name(site.query_name)]["x_query"].append(site)
                sides[self._first_name(site.key_name)]["x_key"].append(site)
            for projection, attributes in sides.items():
                if projection in self.modules and not projection.endswith(PACKED):
                    hook = self._hook(self.modules[projection], partial(self._capture, name, attributes))
                    keep(self.modules[projection].register_forward_pre_hook(hook, with_kwargs=True))
        # The last of all: the model itself may be the attention module, whose run must end before the pass does.
        for one in entries:
            keep(one.register_forward_hook(OutsideHook(one, self._end_pass), always_call=True))  # type: ignore

    def _first_name(self, name: str) -> str:
        return self.first_names[id(self.modules[name])] if name in self.modules else name

    def _hook(self, module: nn.Module, function: Callable[..., None], owner: str = "") -> Hook:
        """A compiled model sees one number to compare, and no graph breaks: passes that are observed run eagerly."""

        def hook(own: Any, module: nn.Module, *given: Any) -> None:
            if self.num_observing and own() is module and (passes := self._passes()) and passes[-1] is not None:
                function(passes[-1], module, *given)
            elif owner and not torch.compiler.is_compiling() and own() is module and self._is_outside():
                self.outside.add(owner)

        return Hook(module, hook)

    def _is_outside(self) -> bool:
        """Tell whether a step is watched, and no call of the model itself is under way."""
        return not self._passes() and self.seen.is_due() and not in_backward()

    def unseen(self) -> Iterator[str]:
        """Passes in a full graph, which cannot be left for a look; modules that ran in no call of the model itself."""
        if any(hook.is_swallowed for hook in self.passing):
            yield (
                "passes in a graph compiled with fullgraph=True are not looked at: attach to what torch.compile "
                "returned, AttentionMonitor(compiled, …)"
            )
        if self.was_transformed:
            yield "passes under a transformation of torch.func (grad, vmap) are not looked at"
        if self.outside:
            first, more = min(self.outside), f" and {len(self.outside) - 1} more" if len(self.outside) > 1 else ""
            yield f"`{first}`{more} ran outside of a call of the model itself, model(…): not looked at there"

    def _passes(self) -> list[WatchedPass | None]:
        if not hasattr(self.local, "passes"):
            self.local.passes = []
        return self.local.passes

    def _begin_pass(self, own: Any, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if own() is not module:
            return
        run, passes = None, self._passes()
        if passes and module is not self.entry:  # an encoder within its model's own pass
            run = passes[-1]
        elif not any(passes) and not in_backward() and self.seen.is_due() and not self._is_left_out():
            run = WatchedPass.of(module, args, kwargs)
            run.modes.enter_context(Eagerly(within_compiled=in_compiled()))
            follow = run.modes.enter_context(self.seen.found.recording())
            run.modes.enter_context(Interception(partial(self._call, run), written_out=True, follow=follow))
            self.num_observing += 1
            self.num_passes += 1
        passes.append(run)

    def _is_left_out(self) -> bool:
        """A model that is compiled around these hooks compiles in its first pass: run as written, it never would."""
        if transformed := in_transform():
            self.was_transformed = True
        is_first, self.was_called = not self.was_called, True
        return transformed or in_shape_inference() or (is_first and in_compiled())

    def _end_pass(self, own: Any, module: nn.Module, args: tuple, output: object) -> None:
        if own() is not module or not (passes := self._passes()):
            return
        run = passes.pop()
        if run is not None and not any(one is run for one in passes):
            self.num_observing -= 1
            run.modes.close()

    def _begin(self, name: str, run: WatchedPass, module: nn.Module, args: tuple, kwargs: dict[str, object]) -> None:
        run.running[name] = ModuleInputs.of(module, args, kwargs)

    def _capture(
        self, name: str, attributes: dict[str, list[AttentionModule]], run: WatchedPass, module: nn.Module, *given: Any
    ) -> None:
        """Keep the input of a projection under each attribute that it serves, until its attention module is left."""
        x, served = first_argument(*given), {id(site): site for sites in attributes.values() for site in sites}
        if name not in run.running or not isinstance(x, Tensor):
            return
        if len(served) == 1:  # else its layers share the projection, and the call tells which it is
            (site,) = served.values()
            before = run.current.get(name)
            if before is not None and before is not site:  # a module with several layers' projections goes on
                self._finish(run, before, run.running[name])
                run.running[name] = ModuleInputs(run.running[name].given, run.running[name].is_flash)
            run.current[name] = site
        for attribute in attributes:
            setattr(run.running[name], attribute, whole(x.detach()))

    def _end(self, name: str, run: WatchedPass, module: nn.Module, args: tuple, output: object) -> None:
        inputs, site = run.running.pop(name, None), self._site(run, name)
        run.num_runs[name] += 1
        run.current.pop(name, None)
        if inputs is not None:
            self._finish(run, site, inputs)

    def _finish(self, run: WatchedPass, site: AttentionModule, inputs: ModuleInputs) -> None:
        """Reconstruct the attention that no kernel was seen to compute."""
        if inputs.was_seen or inputs.x_query is None or inputs.x_key is None:
            return
        if site.block != "cross" and run.has_cached_keys:
            self.num_cached += 1
        else:
            self.seen.by_inputs(site, inputs, run)

    def _site(self, run: WatchedPass, name: str) -> AttentionModule:
        """Name the layer: where several share a module and its projections, by the index of this call."""
        sites = self.owners[name]
        return run.current.get(name) or sites[run.num_runs[name] % len(sites)]

    def _call(self, run: WatchedPass, call: AttentionCall) -> None:
        """A kernel was called: whose layer is it, and was that not seen already?"""
        name = next((self.owner_names[id(one)] for one in call.modules if id(one) in self.owner_names), None)
        if name is None:
            if not self.owners and call.logits is None:
                self.seen.by_call(None, call, None, run)
            elif not self.owners:
                self.seen.written_out(call)
            elif call.logits is None:
                self.seen.further(call)
            return
        inputs = run.running.get(name)
        if call.logits is not None and (inputs is None or inputs.was_seen):
            return  # some other softmax: a router's, a pooling's
        was_read = self.seen.by_call(self._site(run, name), call, inputs, run)
        # Of a share, or of a kernel's call that cannot be read, inputs tell no more: who masks, and how, is its own.
        if (was_read or call.is_share or call.logits is None) and inputs is not None:
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
