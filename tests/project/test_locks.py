"""The locks: every package that `make` installs, at one version, by hashes, and as pyproject.toml wants it."""

import re
import tomllib
from importlib.metadata import distributions, requires
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = ["dev", "weights", "tools"]
BLOCK = re.compile(r"^([\w.-]+)==(\S+)(?: ; (.+?))? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)


def locked(name: str) -> list[tuple[str, str, str]]:
    """Name, version and marker of each package in a lock; fails on a line that is no part of one."""
    text = (ROOT / "locks" / f"{name}.txt").read_text(encoding="utf-8")
    rest = [line for line in BLOCK.sub("", text).splitlines() if not line.startswith("#")]
    assert not rest, f"not pinned by version and hash: {rest[:3]}"
    return [(canonicalize_name(found[1]), found[2], found[3] or "") for found in BLOCK.finditer(text)]


def wanted() -> list[Requirement]:
    """What pyproject.toml asks for the tests, the docs and the package itself, one extra after the other."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras, lines = project["optional-dependencies"], list(project["dependencies"])
    waiting = ["dev", "docs"]
    while waiting:
        for requirement in map(Requirement, extras[waiting.pop()]):
            waiting += requirement.extras if requirement.name == "locater" else ()
            lines += [] if requirement.name == "locater" else [str(requirement)]
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in (*lines, *constraints) if line and not line.startswith("#")]


@pytest.mark.parametrize("lock", LOCKS)
def test_no_address_and_no_path(lock):
    text = (ROOT / "locks" / f"{lock}.txt").read_text(encoding="utf-8")
    assert locked(lock) and not re.search(r"://|--index|--find-links|file:|/\w+/", text)


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
def test_the_lock_has_what_the_project_wants(python, system):
    here = dict(python_version=python, python_full_version=f"{python}.9", sys_platform=system)
    here |= dict(os_name="nt" if system == "win32" else "posix", implementation_name="cpython")
    found = [(name, version) for name, version, marker in locked("dev") if not marker or Marker(marker).evaluate(here)]
    versions = dict(found)
    assert len(versions) == len(found), "a package at two versions"
    assert "torch" not in versions, "its hash is another on each platform: constraints.txt pins it"
    for requirement in wanted():
        if requirement.name != "torch":
            version = versions[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), f"{requirement}, got {version}: make lock"


@pytest.mark.parametrize("lock", ["tools", "weights"])
def test_a_lock_has_what_its_list_wants(lock):
    lines = (ROOT / "locks" / f"{lock}.in").read_text(encoding="utf-8").splitlines()
    wants = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {name: version for name, version, _ in locked(lock)}
    assert wants and all(one.specifier.contains(versions[canonicalize_name(one.name)]) for one in wants)


def test_the_lock_has_what_its_packages_want():
    """By what those that are installed say of themselves; pip is told not to look."""
    names, lacking = {name for name, *_ in locked("dev")} | {"torch"}, []
    for name in sorted(names & {canonicalize_name(one.metadata["Name"]) for one in distributions()}):
        for requirement in map(Requirement, requires(name) or ()):
            is_wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            lacking += (
                [(name, str(requirement))] if is_wanted and canonicalize_name(requirement.name) not in names else []
            )
    assert len(names) > 100 and not lacking, f"{lacking[:3]}: make lock"


def test_a_lock_that_is_behind_would_be_noticed(monkeypatch):
    kept = [entry for entry in locked("dev") if entry[0] != "ruff"]
    monkeypatch.setitem(globals(), "locked", lambda name: kept)
    with pytest.raises(KeyError, match="ruff"):
        test_the_lock_has_what_the_project_wants("3.11", "linux")
