import os

import pytest
import torch
from jaxtyping import install_import_hook

# Shapes written in signatures are checked while the tests run, wherever tensors are computed with.
COMPUTING = ("attention", "head", "positions", "prediction", "projections", "spectra", "stabilisers", "theory")
TRAINING = ("training",)
install_import_hook([f"locater.{name}" for name in COMPUTING + TRAINING], "beartype.beartype")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

# Scripts that tests start as processes of their own: doctest must not import them.
collect_ignore_glob = ["compiled_*.py", "distributed/*.py"]

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """One Chromium for all tests of pages."""
    from browser import Browser

    found = Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.driver.quit()
