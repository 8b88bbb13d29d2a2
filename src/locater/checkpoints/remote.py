"""Weights that lie elsewhere: a Hugging Face id, or any address that fsspec knows. Only the bytes asked for travel."""

from typing import Any

from ..errors import Refusal, refusal
from ..records import Json
from .bytes import Folder, LocalFolder, check_range
from .document import read_object
from .locate import INDEX, METADATA, WEIGHTS, choose

# Seconds until an address counts as out of reach, and without a single byte during a transfer.
CONNECT, SILENCE = 15, 60
# What addresses may begin with. fsspec knows more: chains, archives, and references that it renders as templates.
PROTOCOLS = ("http", "https", "hf", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "hdfs")
PROTOCOLS += ("webhdfs", "ftp", "sftp", "ssh", "memory")


class RemoteBytes:
    """A file behind fsspec, one request per read and nothing read ahead."""

    def __init__(self, system: Any, path: str) -> None:
        self.name = path.partition("?")[0].rstrip("/").rpartition("/")[2]
        self.path = path
        self.file = system.open(path, "rb", cache_type="none")
        if not isinstance(self.file.size, int) or not self.file.seekable():
            raise refusal(f"a server that sends parts of {self.name}", "one that does not", "download the file first")
        self.size: int = self.file.size

    def read(self, start: int, length: int) -> bytearray:
        check_range(self, start, length)
        try:
            self.file.seek(start)
            data = bytearray(self.file.read(length)) if length else bytearray()
        except Exception as cause:  # noqa: BLE001  (each back-end has errors of its own)
            raise _unreachable(self.path, cause) from None
        if len(data) != length:
            raise refusal(
                f"{length} bytes of {self.name}", len(data), "the server does not send parts; download it first"
            )
        return data

    def readinto(self, start: int, view: memoryview) -> None:
        view[:] = self.read(start, len(view))

    def close(self) -> None:
        self.file.close()


class RemoteFolder:
    """A folder behind fsspec. Web servers cannot list; a query (such as a signature) belongs to one file only."""

    def __init__(self, system: Any, root: str, *, can_list: bool, queries: dict[str, str] | None = None) -> None:
        self.system, self.place, self.can_list = system, root, can_list
        self.queries = queries or {}
        self.found: dict[str, RemoteBytes | None] = {}

    def files(self) -> frozenset[str]:
        if not self.can_list:
            return frozenset()
        try:
            items = self.system.ls(self.place, detail=True)
        except FileNotFoundError:
            raise refusal("a folder that exists", f"{self.place}: no such folder", "check the spelling") from None
        except Exception as cause:  # noqa: BLE001
            raise _unreachable(self.place, cause) from None
        return frozenset(item["name"].rpartition("/")[2] for item in items if item["type"] == "file")

    def find(self, name: str) -> RemoteBytes | None:
        if name not in self.found:
            self.found[name] = self._find(f"{self.place}/{name}{self.queries.get(name, '')}")
        return self.found[name]

    def _find(self, path: str) -> RemoteBytes | None:
        try:
            return RemoteBytes(self.system, path)
        except Refusal:
            raise
        except FileNotFoundError as cause:
            # fsspec says "not found" for a server that could not be reached, too.
            if isinstance(cause.__cause__, OSError):
                raise _unreachable(path, cause.__cause__) from None
            return None
        except Exception as cause:  # noqa: BLE001
            raise _unreachable(path, cause) from None


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
        remedy = f'install what reads {protocol}://, or install it with: pip install "locater[remote]"'
        raise refusal("an address that can be read", f"{address[:200]} ({cause})", remedy) from None
    root, _, last = path.rstrip("/").rpartition("/")
    if last.endswith((*WEIGHTS, INDEX)) or last == METADATA:
        return RemoteFolder(system, root, can_list=not is_web, queries={last: mark + query}), last
    return RemoteFolder(system, path.rstrip("/"), can_list=not is_web), None


def locate_hub(text: str) -> Folder:
    """The folder of `name`, `owner/name` or `owner/name@revision`: from the local cache if complete, else by range."""
    hub = _import("huggingface_hub", text, extra="hf")
    name, _, revision = text.partition("@")
    cached = hub.try_to_load_from_cache(name, "config.json", revision=revision or None)
    if isinstance(cached, str):
        from pathlib import Path

        folder = LocalFolder(Path(cached).parent)
        if _is_complete(folder):
            return folder
    try:
        name = hub.HfApi().model_info(name, revision=revision or None, timeout=CONNECT).id
    except (hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError, hub.errors.HFValidationError):
        remedy = "check the spelling, or log in with `hf auth login` if it is private or gated"
        raise refusal("a path on disk or a model on Hugging Face", f"{text!r}, which is neither", remedy) from None
    except Exception as cause:  # noqa: BLE001  (every way a network can fail)
        raise _unreachable(f"{text} on Hugging Face (there is no such path on disk)", cause) from None
    return RemoteFolder(hub.HfFileSystem(), f"{name}@{revision}" if revision else name, can_list=True)


def _is_complete(folder: LocalFolder) -> bool:
    """Whether all weights of a cached model are on disk."""
    try:
        files = choose(folder)
        index = folder.find(files[0]) if files[0].endswith(INDEX) else None
        shards = read_object(index).get("weight_map", {}).values() if index else files
        return all(isinstance(shard, str) and folder.find(shard) is not None for shard in shards)
    except (Refusal, AttributeError):
        return False


def _web_settings(address: str) -> Json:
    aiohttp = _import("aiohttp", address, extra="remote")
    return {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=None, sock_connect=CONNECT, sock_read=SILENCE)}}


def _import(module: str, source: str, *, extra: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        remedy = f'to read from elsewhere, install it with: pip install "locater[{extra}]"'
        raise refusal("a path on disk", f"{source[:200]!r}, which needs {module}", remedy) from None


def _unreachable(path: str, cause: BaseException) -> Refusal:
    reason = (str(cause).splitlines() or [""])[0][:160] or type(cause).__name__
    remedy = "check the network and the address, or give a local copy"
    return refusal(f"to reach {path.partition('?')[0][:200]}", f"{type(cause).__name__} ({reason})", remedy)
