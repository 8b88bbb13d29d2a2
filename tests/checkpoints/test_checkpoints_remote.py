"""Weights over the network: a server on this machine counts the bytes it sends."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from safetensors.torch import save_file

from locater import checkpoints
from locater.checkpoints import is_hub_id
from locater.errors import Refusal

pytestmark = pytest.mark.quick


class Handler(BaseHTTPRequestHandler):
    """Files of `server.root`, by range if `server.ranges`; counts what bodies it sends."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        path = self.server.root / self.path.lstrip("/").partition("?")[0]
        if not path.is_file():
            return self.send(404, b"", 0, with_body)
        data = path.read_bytes()
        wanted = self.headers.get("Range")
        if not (wanted and self.server.ranges):
            return self.send(200, data, len(data), with_body)
        start, stop = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
        return self.send(206, data[start : stop + 1], len(data), with_body)

    def send(self, status: int, body: bytes, size: int, with_body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 206:
            self.send_header("Content-Range", f"bytes */{size}")
        self.end_headers()
        if with_body:
            self.server.sent += len(body)
            self.wfile.write(body)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def server(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.root, server.sent, server.ranges = tmp_path, 0, True
    server.address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def header_bytes(path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_only_headers_and_asked_tensors_travel(server, tmp_path):
    torch.manual_seed(0)
    parts = {f"model-0000{i}-of-00002.safetensors": {f"a{i}": torch.randn(500, 64), f"b{i}": torch.randn(300, 64)}
             for i in (1, 2)}  # fmt: skip
    for file, tensors in parts.items():
        save_file(tensors, tmp_path / file)
    weight_map = {name: file for file, tensors in parts.items() for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    with checkpoints.open(server.address) as checkpoint:
        texts = ("config.json", "model.safetensors.index.json")
        headers = sum(header_bytes(tmp_path / file) for file in parts)
        headers += sum((tmp_path / text).stat().st_size for text in texts)
        assert checkpoint.config == {"model_type": "x"} and server.sent <= headers
        assert checkpoint.read("a1").equal(parts["model-00001-of-00002.safetensors"]["a1"])
        assert checkpoint.read("b2", rows=(10, 30)).equal(parts["model-00002-of-00002.safetensors"]["b2"][10:30])
    assert server.sent <= 1.02 * (headers + 500 * 64 * 4 + 20 * 64 * 4)


@pytest.mark.parametrize("address", ["{}/deep/x.safetensors", "{}/deep/x.safetensors?download=true"])
def test_one_file(server, tmp_path, address):
    (tmp_path / "deep").mkdir()
    save_file({"a": torch.ones(3, 2)}, tmp_path / "deep" / "x.safetensors")
    with checkpoints.open(address.format(server.address)) as checkpoint:
        assert checkpoint.read("a").equal(torch.ones(3, 2)) and checkpoint.config == {}


def test_torch_file_by_range(server, tmp_path):
    tensors = {"a": torch.randn(1000, 64), "b": torch.randn(10, 3)}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with checkpoints.open(server.address) as checkpoint:
        assert checkpoint.read("b").equal(tensors["b"])
    assert server.sent < 20_000


def test_a_server_without_ranges(server, tmp_path):
    server.ranges = False
    save_file({"a": torch.ones(300, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(Refusal, match="download|range"):
        checkpoints.open(server.address)


@pytest.mark.parametrize("path", ["", "/nothing", "/x.safetensors"])
def test_nothing_there(server, path):
    with pytest.raises(Refusal, match="weights in|missing the"):
        checkpoints.open(server.address + path)


def test_truncated_on_the_server(server, tmp_path):
    save_file({"a": torch.ones(300, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:500])
    with pytest.raises(Refusal, match="truncated"):
        checkpoints.open(server.address)


def test_nobody_listens():
    with pytest.raises(Refusal, match="cannot reach http://127.0.0.1:9/"):
        checkpoints.open("http://127.0.0.1:9/x.safetensors")


def test_unknown_protocol():
    with pytest.raises(Refusal, match="an address that can be read"):
        checkpoints.open("nothing://x/y")


def test_a_place_that_lists(tmp_path):
    import fsspec

    system = fsspec.filesystem("memory")
    save_file({"a": torch.ones(3, 2)}, tmp_path / "other.safetensors")
    system.pipe("/place/other.safetensors", (tmp_path / "other.safetensors").read_bytes())
    with checkpoints.open("memory://place") as checkpoint:
        assert checkpoint.read("a").equal(torch.ones(3, 2))
    with pytest.raises(Refusal, match="no such folder"):
        checkpoints.open("memory://elsewhere")


@pytest.mark.parametrize("text", ["./x", "/x", "a/b/c", "x.safetensors", "org/x.gguf", "../x", "x.json", "-x", ""])
def test_what_looks_like_a_path_is_one(text, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert not is_hub_id(text)
    if text:
        with pytest.raises(Refusal, match="no such file"):
            checkpoints.open(text)


@pytest.mark.parametrize("text", ["gpt2", "org/name", "org/name-2.5@main", "org/name@refs/pr/1"])
def test_what_looks_like_an_id_is_one(text):
    assert is_hub_id(text)


def test_missing_extras(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(Refusal, match=r'pip install "locater\[hub\]"'):
        checkpoints.open("gpt2")
    with pytest.raises(Refusal, match=r'pip install "locater\[remote\]"'):
        checkpoints.open("https://example.org/x.safetensors")


class Hub:
    """Stands for huggingface_hub's API: knows one model, or cannot be reached."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def model_info(self, name, **_):
        if self.error:
            raise self.error
        return type("Info", (), {"id": f"canonical/{name}"})


def not_found() -> Exception:
    from huggingface_hub.errors import RepositoryNotFoundError

    return RepositoryNotFoundError.__new__(RepositoryNotFoundError)


def no_route() -> Exception:
    return ConnectionError("no route")


@pytest.mark.parametrize(("error", "message"), [(not_found, "or log in"), (no_route, "cannot reach .*no route")])
def test_hub_failures(monkeypatch, error, message):
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: Hub(error()))
    with pytest.raises(Refusal, match=message) as caught:
        checkpoints.open("no-such-owner/no-such-model")
    assert "\n" not in str(caught.value)


def test_hub_id_is_read_by_range(monkeypatch, tmp_path):
    import fsspec

    monkeypatch.setattr("huggingface_hub.HfApi", lambda: Hub(None))
    monkeypatch.setattr("huggingface_hub.HfFileSystem", lambda: fsspec.filesystem("memory"))
    save_file({"a": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    fsspec.filesystem("memory").pipe("/canonical/tiny/model.safetensors", (tmp_path / "model.safetensors").read_bytes())
    with checkpoints.open("tiny") as checkpoint:
        assert checkpoint.read("a").equal(torch.ones(3, 2))


def test_hub_cache_serves_without_network(monkeypatch, tmp_path):
    save_file({"a": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: str(tmp_path / "config.json"))
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: Hub(ConnectionError("no route")))
    with checkpoints.open("org/tiny") as checkpoint:
        assert checkpoint.config == {"model_type": "x"}
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(Refusal, match="cannot reach org/tiny"):
        checkpoints.open("org/tiny")
