"""What a host of the repository runs: workflows that parse, and the action for continuous integration, really run."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
import torch
import yaml

from command import locater
from locater.monitor import AttentionMonitor, JsonLines

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "src" / "locater" / "example")
DOCUMENTS = [*(ROOT / ".github").rglob("*.yml"), ROOT / "action.yml", ROOT / ".pre-commit-config.yaml"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_parse_and_make_targets_exist(path):
    assert isinstance(yaml.safe_load(path.read_text()), dict)
    makefile = (ROOT / "Makefile").read_text()
    for line in path.read_text().splitlines():
        words = line.partition("- run: make ")[2].split()
        assert not words or "matrix" in line or f"\n{words[0]}:" in makefile, line


def scan_step(model: str, condition: str, folder: Path) -> subprocess.CompletedProcess:
    script = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"][1]["run"]
    outputs = {"GITHUB_OUTPUT": str(folder / "outputs"), "RUNNER_TEMP": str(folder)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | outputs | {"MODEL": model, "CONDITION": condition, "PATH": path}
    return subprocess.run(["bash", "-e", "-c", script], env=environment, capture_output=True, text=True, cwd=folder)


def test_the_action_fails_where_a_condition_is_met(tmp_path):
    met = scan_step(EXAMPLE, "eta>0", tmp_path)
    assert met.returncode == 3, met.stderr
    assert (tmp_path / "outputs").read_text() == f"json={tmp_path / 'scan.json'}\n"
    assert json.loads((tmp_path / "scan.json").read_text())["heads"]
    assert scan_step(EXAMPLE, "eta<0", tmp_path).returncode == 0


def test_names_are_never_read_as_commands(tmp_path):
    hostile = scan_step("x; touch planted $(touch planted) `touch planted`", "eta>0", tmp_path)
    assert hostile.returncode == 1 and not (tmp_path / "planted").exists()


def test_the_wheel_carries_the_table_of_families():
    path = ROOT / "dev" / "families.py"
    spec = importlib.util.spec_from_file_location("families", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    kept = json.loads(resources.files("locater.models").joinpath("families.json").read_text(encoding="utf-8"))
    assert kept == script.document(), "python dev/families.py"
    assert sum(family["how"] in ("table", "proven") for family in kept["families"]) == 373


def test_the_placeholder_of_the_owner_stands_where_the_checklist_says():
    """One word to replace before the first release, and no other address of a host in the project's metadata."""
    pages = [ROOT / "pyproject.toml", *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    checklist = ROOT / "CONTRIBUTING.md"
    places = {str(path.relative_to(ROOT)) for path in pages if re.search(r"\b(OWNER|ADDRESS)\b", path.read_text())}
    places -= {checklist.name, "CHANGELOG.md"}
    assert places == {"pyproject.toml", "README.md", "docs/notebooks.md"}
    assert all(path in checklist.read_text() for path in places)


WRITERS = {
    "scan": ["scan", EXAMPLE],
    "compare": ["compare", EXAMPLE, EXAMPLE],
    "predict": ["predict", EXAMPLE, "--text", "random", "--calibration", "2", "--test", "2", "--window", "64"],
    "theory": ["theory"],
    "phase-diagram": ["theory", "--phase-diagram", "--length", "16"],
    "doctor": ["doctor"],
    "families": ["families"],
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_json_names_its_schema(name, tmp_path):
    assert locater(*WRITERS[name], "--json", tmp_path / "out.json").code == 0
    document = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert next(iter(document)) == "schema" and re.fullmatch(rf"locater\.{name}/\d+", document["schema"])


def test_every_line_of_a_monitor_names_its_schema(tmp_path):
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    with AttentionMonitor(model, every=1, sinks=[JsonLines(tmp_path / "log.jsonl")]) as monitor:
        for _ in range(2):
            model(torch.randn(2, 8, 16)).sum().backward()
            monitor.step()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["schema"] for line in lines] == ["locater.monitor/1"] * 2
