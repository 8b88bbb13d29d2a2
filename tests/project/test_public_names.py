"""The public doors: few, lazy at run time, and the same for an editor as for Python."""

import ast
import inspect
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import locater

PACKAGE = Path(locater.__file__).parent


def typed_names() -> dict[str, str | None]:
    """What a type checker sees: each public name with the module that it is imported from."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module for node in imports for alias in node.names}


def test_an_editor_sees_what_python_does():
    assert typed_names() == locater._HOMES
    assert sorted(locater.__all__) == sorted(locater._HOMES)


def test_the_doors_are_few():
    assert len(locater.__all__) < 15


@pytest.mark.parametrize("name", locater.__all__)
def test_every_door_opens_and_says_what_it_is(name):
    thing = getattr(locater, name)
    assert inspect.getdoc(thing)
    assert name in dir(locater)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'scam'"):
        _ = locater.scam


def test_importing_the_package_loads_no_torch():
    program = "import sys, locater; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# Modules of the package that no scan of a stored model of a known family has a use for.
UNUSED = ("stabilisers", "monitor", "prediction", "integrations", "attention", "models.live", "models.proof")
UNUSED += tuple(f"checkpoints.{part}" for part in ("gguf", "torch", "distributed", "quantised", "remote", "adapter"))
UNUSED += ("scanning.compare", "report.page", "theory.exact")
MOST_MODULES = 74


def test_a_scan_loads_no_compiler_no_other_library_and_nothing_that_it_does_not_use():
    """Each of the libraries takes as long to import as torch itself."""
    heavy = ["torch._dynamo", "torch.distributed.tensor", "transformers", "scipy.stats", "pandas", "matplotlib"]
    program = """
import json, sys
from locater.cli import app
app(["scan", "pip:locater"], standalone_mode=False)
print(json.dumps([*sys.modules]), file=sys.stderr)"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stderr.strip().splitlines()[-1])
    assert not {*heavy} & {*loaded}
    own = [name.partition(".")[2] for name in loaded if name.startswith("locater")]
    assert not [name for name in own if name.startswith(UNUSED)], "imported by a scan that does not use it"
    assert not [name for name in loaded if name.startswith("locater_lab")]
    assert len(own) <= MOST_MODULES


def test_types_ship_with_the_package():
    assert (PACKAGE / "py.typed").exists()


def test_the_version_stands_once():
    assert locater.__version__ == version("locater")
