import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from jaxtyping import install_import_hook

# Folders mirror the source; what a file of tests defines, others import by its name alone.
sys.path.extend(str(folder) for folder in sorted(Path(__file__).parent.iterdir()) if folder.is_dir())

# Shapes written in signatures are checked while the tests run, wherever tensors are computed with.
COMPUTING = ("attention", "head", "positions", "prediction", "projections", "spectra", "stabilisers", "theory")
LABORATORY = ("data", "rivals", "train")
HOOKED = [f"locater.{name}" for name in COMPUTING] + [f"locater_lab.{name}" for name in LABORATORY]
install_import_hook(HOOKED, "beartype.beartype")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # in processes that tests start: neighbours share the cores

# Tests must not see what the user's caches hold, nor fill them. Workers of pytest-xdist share the first one's folder.
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if not IS_WORKER:
    OWN_FOLDER = tempfile.mkdtemp(prefix="locater-tests-")
    os.environ["LOCATER_CACHE"] = f"{OWN_FOLDER}/locater"
    os.environ["HF_HOME"] = f"{OWN_FOLDER}/huggingface"

# Scripts that tests start as processes of their own: doctest must not import them.
collect_ignore_glob = ["compiled_*.py", "distributed/*.py"]

torch.set_num_threads(1)

# Files whose tests wait for processes, compilers or a browser. Side by side they start first, so that none is the last.
LONG = (
    "test_training_distributed", "test_locater", "test_sweep", "test_integrations", "test_browser",
    "test_proof", "test_demo", "test_training", "test_pages", "test_paper_script", "test_predict",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))


def pytest_unconfigure(config):
    if not IS_WORKER:
        shutil.rmtree(OWN_FOLDER, ignore_errors=True)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _impatient():
    """A server that is not there is asked again at once: four tests would wait four seconds each."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("locater.checkpoints.remote.PAUSES", (0.01, 0.01, 0.01))
        yield


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """One Chromium for all tests of pages."""
    from browser import Browser, missing

    if absent := missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(absent)
    found = Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.driver.quit()


def pytest_terminal_summary(terminalreporter):
    """Say where the pictures of the pages are."""
    from browser import SCREENSHOTS

    if kept := len(list(SCREENSHOTS.glob("*.png"))):
        terminalreporter.write_line(f"{kept} screenshots of pages in {SCREENSHOTS}")
