"""Strangers, full disks, flipped bits and changing servers: nothing silent, nothing endless, no traceback."""

import json
import math
import os
import shlex
import subprocess
import sys
import threading
import time
import tracemalloc
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import locater
from command import locater as command
from locater import budget, checkpoints, records
from locater.errors import Refusal, Unforeseen, net, refusal, shown, within
from locater.scanning.compare import compare
from training_cases import tiny, write_text

CONFIG = dict(model_type="llama", hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
SECRET = "https://me:topsecret@127.0.0.1:9/m/model.safetensors?X-Signature=topsecret"


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    found = {}
    for layer in range(2):
        place = f"model.layers.{layer}."
        found[place + "self_attn.q_proj.weight"] = torch.randn(16, 16)
        found[place + "self_attn.k_proj.weight"] = torch.randn(8, 16)
        found[place + "input_layernorm.weight"] = torch.rand(16) + 0.5
    return found


def write(folder: Path, state=None, **config) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors() if state is None else state, folder / "model.safetensors")
    return folder


# --- silent wrong success


def test_compare_with_a_damaged_checkpoint_is_no_success(tmp_path):
    state = tensors()
    state["model.layers.0.self_attn.q_proj.weight"][:8] = torch.nan
    write(tmp_path / "whole")
    write(tmp_path / "half", state)
    found = command("compare", tmp_path / "whole", tmp_path / "half", "--json", tmp_path / "x.json")
    assert found.code == 1 and "2 not read" in found.out and "NaN" in found.err
    assert len(json.loads((tmp_path / "x.json").read_text())["refused"]) == 2
    assert len(compare([tmp_path / "whole", tmp_path / "half"]).refused) == 2


@pytest.mark.parametrize("factors", [[1.0], [1.0, 2.0, 3.0], [1.0, "x"], [1.0, 0.0], 3])
def test_factors_of_another_length_than_the_pairs(factors, tmp_path):
    scaling = dict(rope_type="longrope", short_factor=factors, long_factor=factors, factor=2.0)
    write(tmp_path, rope_scaling=scaling, original_max_position_embeddings=8, max_position_embeddings=16)
    with pytest.raises(Refusal, match="2 positive numbers for `short_factor`"):
        locater.scan(tmp_path)


def test_nan_in_a_heads_norm_is_not_read(tmp_path):
    state = tensors() | {f"model.layers.{n}.self_attn.{s}_norm.weight": torch.ones(4) for n in range(2) for s in "qk"}
    write(tmp_path / "a", state, model_type="qwen3", head_dim=4)
    assert not locater.scan(tmp_path / "a").refused
    state["model.layers.1.self_attn.k_norm.weight"][2] = torch.nan
    write(tmp_path / "b", state, model_type="qwen3", head_dim=4)
    found = locater.scan(tmp_path / "b")
    assert len(found.refused) == 4 and {row.layer for row in found.heads} == {0}


@pytest.mark.parametrize("name", ["wte.weight", "wpe.weight"])
def test_nan_in_a_table_of_embeddings(name, tmp_path):
    config = dict(model_type="gpt2", n_embd=16, n_layer=1, n_head=2, n_positions=256, vocab_size=300)
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = {"wte.weight": torch.randn(300, 16), "wpe.weight": torch.randn(256, 16), "h.0.ln_1.weight": torch.ones(16)}
    state |= {"h.0.attn.c_attn.weight": torch.randn(16, 48), "h.0.attn.c_attn.bias": torch.zeros(48)}
    state["h.0.ln_1.bias"] = torch.zeros(16)
    save_file(state, tmp_path / "model.safetensors")
    assert locater.scan(tmp_path).heads
    state[name][:, 3] = torch.nan
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(Refusal, match=f"finite numbers in .*{name}.*got NaN or infinity"):
        locater.scan(tmp_path)


def test_a_layer_without_attention_is_not_called_another_kind(tmp_path):
    state = {name: tensor for name, tensor in tensors().items() if "layers.1.self_attn" not in name}
    found = locater.scan(write(tmp_path, state))
    assert found.coverage == "PARTIAL: 1 of 2 layers, no queries and keys in decoder layers 1"


def test_a_gguf_beside_another_models_config(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(16)
    writer.add_head_count(2)
    for side in "qk":
        writer.add_tensor(f"blk.0.attn_{side}.weight", torch.randn(16, 16).numpy())
    writer.add_tensor("blk.0.attn_norm.weight", torch.ones(16).numpy())
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    scaling = {"rope_type": "linear", "factor": 8.0}
    for width, expected in ((16, scaling), (4096, None)):
        config = {"model_type": "llama", "hidden_size": width, "rope_scaling": scaling}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with checkpoints.open(tmp_path / "x.gguf") as opened:
            assert opened.config.get("rope_scaling") == expected


class Changing(BaseHTTPRequestHandler):
    """Serves `server.data`, whatever it is by then, with its mark; `server.statuses` come first."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET(body=False)

    def do_GET(self, body=True):
        data = self.server.data if self.path.partition("?")[0].endswith("model.safetensors") else None
        status = self.server.statuses.pop(0) if self.server.statuses else (404 if data is None else 206)
        part = b""
        if data is not None and status == 206:
            low, _, high = self.headers.get("Range", f"bytes=0-{len(data) - 1}").removeprefix("bytes=").partition("-")
            part = data[int(low) : int(high) + 1]
        self.send_response(status)
        self.send_header("Content-Length", str(len(part)))
        if part:
            self.send_header("Content-Range", f"bytes 0-{len(part) - 1}/{len(data)}")
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", f'"{hash(data)}"')
        self.end_headers()
        for start in range(0, len(part) if body else 0, self.server.drip):
            self.wfile.write(part[start : start + self.server.drip])
            time.sleep(self.server.pause)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Changing)
    server.daemon_threads, server.statuses, server.drip, server.pause = True, [], 10**9, 0
    save = Path(os.environ.get("TMPDIR", "/tmp")) / f"served-{os.getpid()}.safetensors"
    save_file({"a": torch.ones(40, 4)}, save)
    server.data = save.read_bytes()
    save.unlink()
    server.address = f"http://127.0.0.1:{server.server_address[1]}/model.safetensors"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_file_that_changes_between_requests(server):
    with checkpoints.open(server.address) as opened:
        assert opened.read("a").sum() == 160
        server.data = server.data[:-4] + b"\0\0\0\0"
        with pytest.raises(Refusal, match="one version of model.safetensors while it is read, got two"):
            opened.read("a")


@pytest.mark.parametrize("status, said", [(403, "log in"), (401, "log in"), (500, "try again"), (503, "try again")])
def test_what_a_server_answers_is_named(status, said, server):
    server.statuses = [status] * 100
    with pytest.raises(Refusal, match=f"the answer {status}.*{said}"):
        checkpoints.open(server.address)


def test_a_server_that_stumbles_is_asked_again(server):
    server.statuses = [404, 503, 500]  # no config.json; then two answers in the way of the file
    with checkpoints.open(server.address) as opened:
        server.statuses = [503, 429]
        assert opened.read("a").sum() == 160


def test_a_server_that_drips_is_given_up(server):
    begun = time.monotonic()
    with budget.limited(seconds=2), checkpoints.open(server.address) as opened:
        server.drip, server.pause = 1, 0.2
        with pytest.raises(Refusal, match="timeout|Timeout"):
            opened.read("a")
    assert time.monotonic() - begun < 20


def test_secrets_of_an_address_are_never_shown(tmp_path):
    found = command("scan", SECRET)
    assert found.code == 1 and "topsecret" not in found.out + found.err and "***" in found.err
    for verb in ("predict", "report", "compare"):
        found = command(verb, *[SECRET.replace(".safetensors", "")] * (2 if verb == "compare" else 1))
        assert found.code == 1 and "topsecret" not in found.out + found.err and "***" in found.err
    assert shown(f"a {SECRET} b") == "a https://***@127.0.0.1:9/m/model.safetensors?*** b"


# --- endless work


def test_a_name_of_a_megabyte(tmp_path):
    write(tmp_path, tensors() | {"a." * 500_000: torch.ones(1)})
    begun = time.process_time()
    with pytest.raises(Refusal, match="at most 1000 name"):
        locater.scan(tmp_path)
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("levels", [1, 5])
def test_a_long_key_before_many_tensors_is_refused_before_names_are_joined(levels, tmp_path):
    """A megabyte that stands before each of 14,000 names would be 14 gigabytes."""
    tree = {str(number): torch.ones(1) for number in range(14_000)}
    for level in range(levels):
        tree = {f"{level}{'k' * (1_000_000 // levels)}": tree}
    torch.save(tree, tmp_path / "x.pt")
    tracemalloc.start()
    with pytest.raises(Refusal, match="at most 1000 name"):
        checkpoints.open(tmp_path / "x.pt")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 * 2**20


def test_many_names_of_permitted_length_are_refused_before_they_are_joined(tmp_path):
    tree = {"a" * 900: {str(number): torch.ones(1) for number in range(2_000)}}
    torch.save(tree, tmp_path / "x.pt")
    with budget.limited(names=500_000), pytest.raises(Refusal, match="at most 500000 names"):
        checkpoints.open(tmp_path / "x.pt")


def test_a_stack_of_more_layers_than_any_model_has(tmp_path):
    """A tensor without numbers costs no byte, whatever its first size: each layer would get a name."""
    header = {"decoder.layers.self_attention.linear_qkv.weight": [2**20, 0, 8]}
    header = {name: dict(dtype="F32", shape=shape, data_offsets=[0, 0]) for name, shape in header.items()}
    data = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)
    with pytest.raises(Refusal, match="at most 10000 layers"):
        locater.scan(tmp_path)


def test_thirty_megabytes_of_opcodes(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "x.pt").write_bytes(b"\x80\x02" + b"K\x000" * 10_000_000 + b".")
    begun = time.process_time()
    with pytest.raises(Refusal, match="at most 3000000 opcodes"):
        checkpoints.open(tmp_path / "x.pt")
    assert time.process_time() - begun < 20


def test_numbers_that_collide_as_keys(tmp_path):
    document = {"model": {"a": torch.ones(3)}, "x": {n * (2**61 - 1): 0 for n in range(1, 30)}}
    torch.save(document, tmp_path / "x.pt")
    with pytest.raises(Refusal, match="beyond 60 bits"):
        checkpoints.open(tmp_path / "x.pt")


LAYOUT = dict(block="decoder", query="l.{layer}.q", key="l.{layer}.k", layers=1, heads=1, prefixes=[""])


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(query="l.{layer:1000000000}.q"), "the name of a module"),
        (dict(key="{layer.__class__}"), "the name of a module"),
        (dict(fused="nonsense"), "one of None, qkv"),
        (dict(transposed="yes"), "true or false"),
        (dict(heads={}), "a number, a word"),
    ],
)
def test_a_layout_cannot_ask_for_more_than_a_name(change, said, tmp_path):
    (tmp_path / "l.yaml").write_text(json.dumps({"attention": [LAYOUT | change]}))
    save_file({"l.0.q.weight": torch.ones(2, 2), "l.0.k.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(Refusal, match=said):
        locater.scan(locater.Stored(tmp_path, layout=tmp_path / "l.yaml"))


def test_aliases_of_aliases(tmp_path):
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60)]
    (tmp_path / "l.yaml").write_text("\n".join([*lines, "attention: *a59"]))
    with pytest.raises(Refusal, match="every value written out"):
        locater.scan(locater.Stored(tmp_path, layout=tmp_path / "l.yaml"))


def test_a_sparse_file_whose_columns_are_not_the_models(tmp_path):
    write(tmp_path)
    place = "model.layers.0."
    shapes = {place + "self_attn.q_proj.weight": [16, 2**33], place + "self_attn.k_proj.weight": [8, 16]}
    shapes[place + "input_layernorm.weight"] = [16]
    header, start = {}, 0
    for name, shape in shapes.items():
        stop = start + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + start)
    with pytest.raises(Refusal, match="16 columns in"):
        locater.scan(tmp_path)
    with checkpoints.open(tmp_path) as opened, pytest.raises(Refusal, match="MB of memory that are free"):
        opened.read("model.layers.0.self_attn.q_proj.weight")


# --- tracebacks


@pytest.mark.parametrize("value", ["x", {}, [], None, True, -1, 10**400, 0.5, "[/x]"])
@pytest.mark.parametrize("key", ["rms_norm_eps", "head_dim", "num_attention_heads", "rope_theta", "rope_scaling"])
def test_config_values_of_any_type(key, value, tmp_path):
    """Read as the default where null is one, or refused; the net stays empty."""
    write(tmp_path, **{key: value})
    try:
        json.dumps(locater.scan(tmp_path).to_json(), allow_nan=False)
    except Refusal as cause:
        assert not isinstance(cause, Unforeseen), cause


def test_the_net_names_the_file_and_asks_for_a_report(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setattr("locater.scanning.source.open_model", lambda *_, **__: 1 / 0)
    with pytest.raises(Unforeseen, match=f"{tmp_path}.*ZeroDivisionError at test_damaged_files.py.*please report it"):
        locater.scan(tmp_path)
    found = command("scan", tmp_path)
    assert found.code == 1 and "please report it" in found.err and "Traceback" not in found.err
    monkeypatch.setenv("LOCATER_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        locater.scan(tmp_path)


def test_errors_of_the_users_own_callback_are_his(tmp_path):
    class Stop(Exception):
        pass

    def progress(*_):
        raise Stop

    with pytest.raises(Stop):
        locater.scan(write(tmp_path), progress=progress)


def test_the_net_lets_refusals_through_as_they_are():
    with pytest.raises(Refusal, match="^expected a, got b$") as caught, net("x"):
        raise refusal("a", "b")
    assert not isinstance(caught.value, Unforeseen)
    with pytest.raises(Unforeseen, match="^place: x: "), within("place"), net("x"):
        raise KeyError("y")


@pytest.mark.parametrize("text", ["\x1b[2J\x07", "a\u202eb", "one\ntwo\r", "y" * 10**6])
def test_what_a_stranger_wrote_is_made_visible_and_cut(text, tmp_path):
    write(tmp_path, model_type=text)
    found = command("scan", tmp_path)
    assert found.code == 1 and len(found.err) < 20_000
    assert all(letter.isprintable() or letter == "\n" for letter in found.err)


def test_a_full_disk_under_standard_output():
    shell = f"{shlex.quote(sys.executable)} -m locater.cli theory --moments 1,1,1"
    shell += " --temperature 1 > /dev/full"
    result = subprocess.run(shell, shell=True, capture_output=True, text=True, check=False)
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    assert "cannot write to standard output" in result.stderr


# --- files written


def test_a_device_is_written_into_and_a_link_stays(tmp_path):
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    received = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()))
    reader.start()
    records.write_json({"a": 1}, pipe)
    reader.join()
    assert json.loads(received[0]) == {"a": 1} and pipe.is_fifo()
    records.write_json({"a": 1}, Path("/dev/null"))
    assert Path("/dev/null").is_char_device()
    (tmp_path / "real.json").write_text("{}")
    (tmp_path / "real.json").chmod(0o640)
    (tmp_path / "link.json").symlink_to("real.json")
    records.write_json({"b": 2}, tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink() and json.loads((tmp_path / "real.json").read_text()) == {"b": 2}
    assert (tmp_path / "real.json").stat().st_mode & 0o777 == 0o640


def test_what_a_killed_process_left_is_swept(tmp_path):
    code = "import os, sys\nfrom pathlib import Path\nfrom locater import records\n"
    code += "records.write(Path(sys.argv[1]), lambda path: (path.write_text('half'), os.kill(os.getpid(), 9)))"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "o.json")], check=False)
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == 1
    mine = tmp_path / f".o.{os.getpid()}-abc.json"  # still being written
    mine.write_text("")
    records.write_json({}, tmp_path / "o.json")
    assert {path.name for path in tmp_path.iterdir()} == {"o.json", mine.name}


# --- training


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from locater_lab.train.run import start

    folder = tmp_path_factory.mktemp("run")
    start(tiny(write_text(folder), steps=4), folder / "run", stop_after=2, say=lambda _: None)
    return folder


def copy_of(run: Path, folder: Path) -> Path:
    import shutil

    shutil.copytree(run / "run", folder / "run")
    return folder / "run"


DIGIT = {"state.json": b'"loss_sum": '}


@pytest.mark.parametrize("pattern", ["*.distcp", "state.json"])
def test_a_flipped_bit_in_a_checkpoint(pattern, run, tmp_path):
    from locater_lab.train.run import resume

    folder = copy_of(run, tmp_path)
    path = next((folder / "checkpoints").glob(f"step-*/{pattern}"))
    data = bytearray(path.read_bytes())
    place = len(data) * 2 // 3 if pattern == "*.distcp" else data.index(DIGIT[pattern]) + len(DIGIT[pattern]) + 3
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(Refusal, match=f"the checkpoint that was written to .*other bytes in {path.name}"):
        resume(folder, say=lambda _: None)


@pytest.mark.parametrize("name", [3, None, [], "../checkpoints", "/dev/zero", "..", "", "a\0b"])
@pytest.mark.parametrize("file", ["index.json", "checksums.json"])
def test_names_in_a_run_lead_nowhere_else(file, name, run, tmp_path):
    """Whether or not the folder is verified."""
    from locater_lab.train.checksums import damaged_files
    from locater_lab.train.run import resume

    checkpoints = copy_of(run, tmp_path) / "checkpoints"
    path = checkpoints / file if file == "index.json" else next(checkpoints.glob(f"step-*/{file}"))
    document = json.loads(path.read_text())
    changed = {"names": {"last": name}} if file == "index.json" else document | {str(name): "0" * 64}
    path.write_text(json.dumps(changed))
    if file == "checksums.json" and str(name) in ("3", "None", "[]"):
        assert damaged_files(path.parent) == [str(name)], "names like others, of files that are not there"
    with pytest.raises(Refusal, match="names of files next to|other bytes in checksums.json") as caught:
        if file == "checksums.json" and str(name) not in ("3", "None", "[]"):
            damaged_files(path.parent)
        resume(checkpoints.parent, verified=file == "checksums.json", say=lambda _: None)
    assert not isinstance(caught.value, Unforeseen)


def test_metrics_that_are_no_json(run, tmp_path):
    from locater_lab.train.run import resume

    path = copy_of(run, tmp_path) / "metrics.jsonl"
    path.write_text('{"kind": "x", "step": 0, "loss": NaN}\n' + path.read_text())
    with pytest.raises(Refusal, match="metrics.jsonl as locater writes them, got ValueError"):
        resume(path.parent, say=lambda _: None)


def test_a_step_that_is_saved_twice_does_not_stand_in_its_own_way(run, tmp_path, monkeypatch):
    """Killed after anything that removes a folder: the index still names one that is whole."""
    import shutil

    from locater_lab.data.sources import open_data
    from locater_lab.train.checksums import damaged_files
    from locater_lab.train.loop import Trainer
    from locater_lab.train.processes import Processes
    from locater_lab.train.run import read_run_config

    folder = copy_of(run, tmp_path)
    config = read_run_config(folder)
    data = open_data(config.data, length=config.shape.context, seed=config.loop.seed, say=lambda _: None)
    trainer = Trainer(config, data, folder, Processes(0, 1, torch.device("cpu")))
    removed = shutil.rmtree

    def check(path, **options):
        removed(path, **options)
        last = trainer.store.folder / trainer.store.names()["last"]
        assert last.is_dir() and damaged_files(last) == []

    monkeypatch.setattr("locater_lab.train.store.shutil.rmtree", check)
    before = trainer.store.names()["last"]
    trainer.save()
    assert trainer.store.names()["last"] != before
    trainer.save()
    assert trainer.store.names()["last"] == before
    trainer.metrics.close()


def test_a_second_interrupt_during_a_save_is_an_interrupt(run, tmp_path, monkeypatch):
    from locater_lab.train.processes import Processes
    from locater_lab.train.store import Store

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", interrupted)
    store = Store(copy_of(run, tmp_path) / "checkpoints", Processes(0, 1, torch.device("cpu")), {})
    with pytest.raises(KeyboardInterrupt):
        store.save({"a": torch.ones(2)}, {"step": 9})
    assert not list(store.folder.glob("*.partial"))


def test_a_token_changed_in_place_is_not_trained_on(tmp_path, monkeypatch):
    from locater_lab.data.sources import tokenise
    from locater_lab.data.text import Corpus
    from locater_lab.fields import DataOptions

    monkeypatch.setenv("LOCATER_CACHE", str(tmp_path))
    corpus, options = Corpus("x", "a b c d " * 50, "a b "), DataOptions(tokenizer="words")
    expected = tokenise(corpus, options).train.tolist()
    path = next(tmp_path.rglob("train.npy"))
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    assert tokenise(corpus, options).train.tolist() == expected
