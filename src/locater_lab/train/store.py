"""Checkpoints on disk by `torch.distributed.checkpoint`: whole or absent, readable by any number of processes."""

import os
import shutil
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from locater.checkpoints.distributed import check_harmless
from locater.errors import Refusal, failed, refusal, within
from locater.records import Json, State, check_beside, read_json, write_json

from .checksums import CHECKSUMS, UNVERIFIED, checksum_of, checksums_of, damaged_files, seal, unseal
from .processes import Processes

INDEX, SMALL = "index.json", "state.json"
PARTIAL = ".partial"
RESTORE = "restore it, or start a new run with --out"
FIELDS = ("step", "best", "loss_sum", "loss_count", "data")  # of the small document


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter once, and the buffers that a state dict holds: those of stabilisers, the models have none."""
    stored = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: one for name, one in model.named_buffers() if name in stored}


def optimiser_state(optimizer: Optimizer, parameters: dict[str, Tensor]) -> State:
    """Adam's moments and counts, Muon's momentum, under the parameters' names; zero where no step was taken yet.

    Learning rates and decays are not stored: the config and the step say them.
    """
    groups = {id(one): group for group in optimizer.param_groups for one in group["params"]}
    trained = {name: one for name, one in parameters.items() if one.requires_grad}
    for parameter in trained.values():
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = _blank(parameter, is_adam="betas" in groups[id(parameter)])
    return {name: optimizer.state[parameter] for name, parameter in trained.items()}


def _blank(parameter: Tensor, *, is_adam: bool) -> State:
    names = ("exp_avg", "exp_avg_sq") if is_adam else ("momentum_buffer",)
    moments = {name: torch.zeros_like(parameter) for name in names}
    return {"step": torch.zeros(()), **moments} if is_adam else moments


class Store:
    """The folder `checkpoints` of a run. `index.json` names the last and the best; nothing else is ever read.

    It also has the checksums of the checkpoints and of the config: `configs` are those that the run may have, two of
    them while it is given another end. Where `verified` is false, none of them is looked at.
    """

    def __init__(
        self, folder: Path, processes: Processes, model_config: Json, *, config: str = "", verified: bool = True
    ) -> None:
        self.folder, self.processes, self.model_config = folder, processes, model_config
        self.configs, self.verified = [config], verified

    def names(self) -> dict[str, str]:
        return self._index()["names"]

    def small(self, which: str = "last") -> Json:
        """The numbers beside the tensors of a checkpoint; {} where there is none yet."""
        name = self.names().get(which)
        return _read(self.folder / name / SMALL, FIELDS) if name else {}

    def _index(self) -> Json:
        path = self.folder / INDEX
        if not path.exists():
            return {"names": {}, "checksums": {}, "configs": self.configs}
        index = unseal(_read(path), path, verified=self.verified)
        names = index.get("names", index)  # older versions wrote nothing else
        if not isinstance(names, dict) or not isinstance(index.get("checksums", {}), dict):
            raise refusal(f"names and checksums in {path}", f"{index!s:.80}", RESTORE)
        with within(str(path)):
            names = {which: check_beside(name, INDEX) for which, name in names.items()}
        return {"checksums": {}, "configs": self.configs} | index | {"names": names}

    def _write_index(self, names: dict[str, str]) -> None:
        checksums = {name: checksum_of(self.folder / name / CHECKSUMS) for name in names.values()}
        index = {"names": names, "checksums": checksums, "configs": self.configs}
        write_json(seal(index), self.folder / INDEX)
        _flush(self.folder)

    def allow_configs(self, configs: list[str]) -> None:
        """From now on, the run's config is one of these."""
        self.configs = configs
        if self.processes.is_first and (self.folder / INDEX).exists():
            self._write_index(self.names())
        self.processes.wait()

    def verify(self, names: Sequence[str] | None = None) -> None:
        """Refuse a config or checkpoints (by default all that are named) that are not what this run wrote."""
        if not self.verified:
            return
        index = self._index()
        if not set(self.configs) <= set(index["configs"]):
            raise refusal(f"the config that the run in {self.folder.parent} was begun with", "another", UNVERIFIED)
        damaged: dict[str, list[str]] = {}
        for name in dict.fromkeys(names or index["names"].values()) if self.processes.is_first else ():
            damaged[name] = damaged_files(self.folder / name, index["checksums"].get(name, ""))
        name = next((name for name, files in damaged.items() if files), None)
        if self.processes.any(name is not None):
            got = f"other bytes in {', '.join(damaged[name][:3])}" if name else "others"
            raise refusal(f"the checkpoint that was written to {self.folder / (name or '')}", got, UNVERIFIED)

    def save(self, state: State, small: Json, *, keep: Sequence[str] = ()) -> None:
        """A new folder under another name, then a rename, then the index: a kill at any moment leaves a whole one.

        It is the last from then on; what else it is, such as the best, is kept until another one is.
        """
        name = self._free_name(small["step"])
        partial = self.folder / (name + PARTIAL)
        if self.processes.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        self.processes.wait()
        try:
            self._write(partial, state, small)
        except (OSError, RuntimeError, CheckpointException) as reason:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(_innermost(reason), KeyboardInterrupt):
                raise KeyboardInterrupt from None
            kept = self.names().get("last")
            remedy = "free some room, then continue with --resume" + (f"; {kept} is intact" if kept else "")
            raise failed(f"write a checkpoint to {self.folder}", _cause(reason), remedy) from None
        if self.processes.is_first:
            self._publish(partial, name, ("last", *keep))
        self.processes.wait()

    def _write(self, partial: Path, state: State, small: Json) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a single process, which is meant
            state_dict_saver.save(state, checkpoint_id=partial, no_dist=self.processes.count == 1)
        if self.processes.is_first:
            write_json(self.model_config, partial / "config.json")  # by which `locater scan` reads it
            write_json(small, partial / SMALL)
            write_json(checksums_of(partial), partial / CHECKSUMS)

    def _free_name(self, step: int) -> str:
        """A name that the index does not use: a step that is saved twice never stands in the way of itself."""
        used = set(self.names().values())
        further = (f"step-again-{'again-' * count}{step:08d}" for count in range(len(used) + 1))
        return next(name for name in (f"step-{step:08d}", *further) if name not in used)

    def _publish(self, partial: Path, name: str, keep: Sequence[str]) -> None:
        _remove(self.folder / name)  # written by a run that was stopped before it could say so, or not the last
        partial.rename(self.folder / name)
        names = self.names() | dict.fromkeys(keep, name)
        self._write_index(names)
        for other in self.folder.glob("step-*"):
            if other.name not in names.values():
                with suppress(OSError):
                    _remove(other)

    def keep(self, which: str, under: str) -> None:
        """The checkpoint of one name has another name too, if there is one."""
        names = self.names()
        if self.processes.is_first and which in names:
            self._write_index(names | {under: names[which]})
        self.processes.wait()

    def load(self, state: State, *, which: str = "last") -> None:
        """Into the tensors of `state`, in place, whatever number of processes wrote them."""
        name = self.names()[which]
        self.verify([name])
        check_harmless(self.folder / name)  # a run's folder may be untrusted, and torch unpickles what it finds
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                state_dict_loader.load(state, checkpoint_id=self.folder / name, no_dist=self.processes.count == 1)
            except (OSError, RuntimeError, CheckpointException) as reason:
                raise refusal(f"a checkpoint of this run in {self.folder / name}", _cause(reason)) from None


def _read(path: Path, names: tuple[str, ...] = ()) -> Json:
    """A small document with at least these names in it."""
    try:
        found = read_json(path)
    except Refusal as reason:
        raise refusal(f"the document that a run wrote to {path}", reason, RESTORE) from None
    if missing := [name for name in names if name not in found]:
        got = f"one without {', '.join(missing)}"
        raise refusal(f"the document that a run wrote to {path}", got, RESTORE)
    return found


def _innermost(reason: BaseException) -> BaseException:
    """The checkpoint library wraps errors by rank."""
    is_wrapped = isinstance(reason, CheckpointException) and reason.failures
    return next(iter(reason.failures.values()))[0] if is_wrapped else reason  # type: ignore[union-attr]


def _cause(reason: BaseException) -> str:
    """The innermost error in one line."""
    reason = _innermost(reason)
    lines = str(getattr(reason, "strerror", None) or reason).strip().splitlines()
    return f"{lines[0]:.160}" if lines else type(reason).__name__


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link, if there is one; never what a link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush(folder: Path) -> None:
    """Make renames in a folder survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
