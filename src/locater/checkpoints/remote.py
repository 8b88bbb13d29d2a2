"""Weights that lie elsewhere: a Hugging Face id, or any address that fsspec knows. Only the bytes asked for travel."""

import time
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from ..budget import budget, timed
from ..errors import Refusal, failed, import_extra, install, instead, refusal
from ..records import Json, JsonMapping, check_beside
from .bytes import ByteSource, Folder, LocalFolder, check_range, read_object
from .sharded import INDEX, METADATA, WEIGHTS, choose

# Seconds until an address counts as out of reach, and without a single byte during a transfer.
CONNECT, SILENCE = 15, 60
SLOWEST = 50_000  # bytes in a second, over a whole request
PAUSES = (0.5, 1.0, 2.0)  # seconds between requests that may yet succeed
ABSENT, BUSY = (404, 410), (408, 425, 429, 500, 502, 503, 504)
# What addresses may begin with. fsspec knows more: chains, archives, and references that it renders as templates.
PROTOCOLS = (
    "http", "https", "hf", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "hdfs", "webhdfs",
    "ftp", "sftp", "ssh", "memory",
)  # fmt: skip


class FarBytes(ByteSource):
    """A file elsewhere, one request per read and nothing read ahead."""

    def __init__(self, system: Any, path: str, size: object) -> None:
        self.system, self.path = system, path
        self.name = path.partition("?")[0].rstrip("/").rpartition("/")[2]
        if not isinstance(size, int):
            raise refusal(f"a server that sends parts of {self.name}", "one that does not", "download the file first")
        self.size = size

    def read(self, start: int, length: int) -> bytearray:
        check_range(self, start, length)
        data = self.request(start, length) if length else bytearray()
        if len(data) != length:
            remedy = "the server does not send parts; download it first"
            raise refusal(f"{length} bytes of {self.name}", len(data), remedy)
        return data

    def readinto(self, start: int, view: memoryview) -> None:
        view[:] = self.read(start, len(view))

    @abstractmethod
    def request(self, start: int, length: int) -> bytearray:
        """Ask for these bytes; others may come."""


class RemoteBytes(FarBytes):
    """A file behind fsspec."""

    def __init__(self, system: Any, path: str) -> None:
        self.file = system.open(path, "rb", cache_type="none")
        super().__init__(system, path, self.file.size if self.file.seekable() else None)

    def request(self, start: int, length: int) -> bytearray:
        with instead(partial(_unreachable, self.path)):  # each back-end has errors of its own
            self.file.seek(start)
            return bytearray(timed(lambda: self.file.read(length)))

    def close(self) -> None:
        self.file.close()


class WebBytes(FarBytes):
    """A file of a web server, by ranges of one version: all answers name the same length and the same mark."""

    def __init__(self, system: Any, path: str, info: JsonMapping) -> None:
        super().__init__(system, path, info.get("size"))
        self.mark = ""

    def request(self, start: int, length: int) -> bytearray:
        headers, data = retried(self.path, lambda: self._answer(start, length))
        mark = headers.get("ETag") or headers.get("Last-Modified") or ""
        total = headers.get("Content-Range", "").rpartition("/")[2]
        if (self.mark and mark != self.mark) or (total.isdigit() and int(total) != self.size):
            remedy = "it was replaced meanwhile; begin again"
            raise refusal(f"one version of {self.name} while it is read", "two", remedy)
        self.mark = mark
        return data

    def _answer(self, start: int, length: int) -> tuple[JsonMapping, bytearray]:
        from fsspec.asyn import sync

        seconds = CONNECT + SILENCE + length / SLOWEST  # a server that drips is given up
        seconds = min(seconds, budget().seconds_left() or seconds)
        answer: Any = sync(self.system.loop, self._fetch, start, length, timeout=seconds)
        return answer

    async def _fetch(self, start: int, length: int) -> tuple[JsonMapping, bytearray]:
        session = await self.system.set_session()
        headers = {"Range": f"bytes={start}-{start + length - 1}", "Accept-Encoding": "identity"}
        async with session.get(self.system.encode_url(self.path), headers=headers) as answer:
            answer.raise_for_status()
            data = bytearray()
            async for part in answer.content.iter_chunked(2**20):
                data += part
                if len(data) > length:  # the whole file, and not what was asked for
                    break
            return answer.headers, data  # which are looked up in any case of letters


def retried(path: str, request: Callable[[], Any]) -> Any:
    """Run a request; a server that is busy or stumbles is asked again, as long as the budget has time."""
    for pause in (*PAUSES, None):
        try:
            return timed(request)
        except FileNotFoundError as cause:
            # fsspec says "not found" for every other answer of a server, too.
            reason: BaseException = cause if cause.__cause__ is None else cause.__cause__
            import aiohttp

            broken = isinstance(reason, aiohttp.ClientConnectionError | TimeoutError)
            if getattr(reason, "status", 404) in ABSENT and not broken:
                raise FileNotFoundError(path) from None
        except Refusal:
            raise
        except Exception as cause:  # noqa: BLE001  (every way a network can fail)
            reason = cause
        status = getattr(reason, "status", None)
        if status in ABSENT:
            raise FileNotFoundError(path) from None
        if pause is None or (isinstance(status, int) and status not in BUSY):
            raise _unreachable(path, reason) from None
        time.sleep(pause)
    raise AssertionError("the last pause is none")


class RemoteFolder:
    """A folder behind fsspec. Web servers cannot list; a query (such as a signature) belongs to one file only."""

    def __init__(self, system: Any, root: str, *, can_list: bool, queries: dict[str, str] | None = None) -> None:
        self.system, self.place, self.can_list = system, root, can_list
        self.queries = queries or {}
        self.found: dict[str, ByteSource | None] = {}

    def files(self) -> frozenset[str]:
        if not self.can_list:
            return frozenset()

        def refused(cause: Exception) -> Refusal:
            is_absent = isinstance(cause, FileNotFoundError)
            absent = refusal("a folder that exists", f"{self.place}: no such folder", "check the spelling")
            return absent if is_absent else _unreachable(self.place, cause)

        with instead(refused):
            items = timed(lambda: self.system.ls(self.place, detail=True))
        return frozenset(item["name"].rpartition("/")[2] for item in items if item["type"] == "file")

    def find(self, name: str) -> ByteSource | None:
        if name not in self.found:
            self.found[name] = self._find(f"{self.place}/{name}{self.queries.get(name, '')}")
        return self.found[name]

    def _find(self, path: str) -> ByteSource | None:
        try:
            if not self.can_list:
                return WebBytes(self.system, path, retried(path, lambda: self.system.info(path)))
            return retried(path, lambda: RemoteBytes(self.system, path))
        except FileNotFoundError:
            return None


def locate_address(address: str) -> tuple[Folder, str | None]:
    """The folder of an address, and the file if its last part is the name of one."""
    protocol = address.partition("://")[0].lower()
    if protocol not in PROTOCOLS or "::" in address:
        known = "download the file first, or use one of " + ", ".join(PROTOCOLS)
        raise refusal("an address that can be read", f"{address[:200]!r}", known)
    fsspec = _import("fsspec", address, extra="remote")
    bare, mark, query = address.partition("?")
    is_web = protocol in ("http", "https")
    try:
        system, path = fsspec.core.url_to_fs(bare, **(_web_settings(address) if is_web else {}))
    except (ImportError, ValueError) as cause:
        remedy = f"{install('remote')}, or what reads {protocol}://"
        raise refusal("an address that can be read", f"{address[:200]} ({cause})", remedy) from None
    root, _, last = path.rstrip("/").rpartition("/")
    if last.endswith((*WEIGHTS, INDEX)) or last == METADATA:
        return RemoteFolder(system, root, can_list=not is_web, queries={last: mark + query}), last
    return RemoteFolder(system, path.rstrip("/"), can_list=not is_web), None


def locate_hub(text: str) -> Folder:
    """The folder of `name`, `owner/name` or `owner/name@revision`: from the local cache if complete, else by range."""
    hub = _import("huggingface_hub", text, extra="hub")
    name, _, revision = text.partition("@")
    cached = hub.try_to_load_from_cache(name, "config.json", revision=revision or None)
    if isinstance(cached, str):
        from pathlib import Path

        folder = LocalFolder(Path(cached).parent)
        if _is_complete(folder):
            return folder
    unknown = hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError, hub.errors.HFValidationError

    def refused(cause: Exception) -> Refusal:
        if not isinstance(cause, unknown):
            return _unreachable(f"{text} on Hugging Face (there is no such path on disk)", cause)
        remedy = "check the spelling, or log in with `hf auth login` if it is private or gated"
        return refusal("a path on disk or a model on Hugging Face", f"{text!r}, which is neither", remedy)

    with instead(refused):  # every way a network can fail
        info = timed(lambda: hub.HfApi().model_info(name, revision=revision or None, timeout=CONNECT))
    # By commit: a branch may move between two requests.
    commit = getattr(info, "sha", None) or revision
    return RemoteFolder(hub.HfFileSystem(), f"{info.id}@{commit}" if commit else info.id, can_list=True)


def _is_complete(folder: LocalFolder) -> bool:
    """Tell whether all weights of a cached model are on disk."""
    try:
        files = choose(folder)
        index = folder.find(files[0]) if files[0].endswith(INDEX) else None
        shards = read_object(index).get("weight_map", {}).values() if index else files
        return all(folder.find(check_beside(shard, files[0])) is not None for shard in shards)
    except (Refusal, AttributeError):
        return False


def _web_settings(address: str) -> Json:
    aiohttp = _import("aiohttp", address, extra="remote")
    return {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=None, sock_connect=CONNECT, sock_read=SILENCE)}}


def _import(module: str, source: str, *, extra: str) -> Any:
    return import_extra(module, f"the package {module}, to read {source[:200]!r}, no path on disk", extra=extra)


def _unreachable(path: str, cause: BaseException) -> Refusal:
    status = getattr(cause, "status", None)
    if isinstance(status, int):
        got = f"the answer {status} ({getattr(cause, 'message', '') or 'no reason given'})"
        remedy = "log in, or check that the address is signed" if status in (401, 403) else "try again later"
        return failed(f"read {path.partition('?')[0][:200]}", got, remedy)
    reason = (str(cause).splitlines() or [""])[0][:160] or type(cause).__name__
    remedy = "check the network and the address, or give a local copy"
    return failed(f"reach {path.partition('?')[0][:200]}", f"{type(cause).__name__} ({reason})", remedy)
