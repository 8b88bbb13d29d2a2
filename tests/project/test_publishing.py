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
import yaml

ROOT = Path(__file__).parents[2]
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
    model = str(ROOT / "src" / "locater" / "example")
    met = scan_step(model, "eta>0", tmp_path)
    assert met.returncode == 3, met.stderr
    assert (tmp_path / "outputs").read_text() == f"json={tmp_path / 'scan.json'}\n"
    assert json.loads((tmp_path / "scan.json").read_text())["heads"]
    assert scan_step(model, "eta<0", tmp_path).returncode == 0


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
    places = {path for path in ("pyproject.toml", "docs/notebooks.md") if "OWNER" in (ROOT / path).read_text()}
    checklist = (ROOT / "CONTRIBUTING.md").read_text()
    assert places == {"pyproject.toml", "docs/notebooks.md"} and all(path in checklist for path in places)


@pytest.mark.parametrize("name", ["scan", "predict", "compare", "monitor"])
def test_every_result_names_its_schema(name):
    """By the source: each document that a command writes begins with the version of its form."""
    sources = "".join(path.read_text() for path in (ROOT / "src" / "locater").rglob("*.py"))
    assert re.search(rf'"schema": "locater\.{name}/\d+"', sources)
