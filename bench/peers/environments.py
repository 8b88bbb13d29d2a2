"""Virtual environments for tools that locater does not depend on: they share this one's torch and bring the rest."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
PACKAGES = {
    "weightwatcher": "weightwatcher==0.7.7",
    "transformer-lens": "transformer-lens==4.3.0",
    "transformer-lens-unfolded": "transformer-lens==4.3.0",
}


def python_for(tool: str) -> Path:
    """The interpreter with this tool, installed at the first call and kept in the user's cache."""
    folder = cache() / PACKAGES[tool]
    python = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        venv.create(folder, with_pip=True, clear=True)
        sites = next(folder.glob("lib/python*/site-packages"))
        (sites / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        command = [python, "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, PACKAGES[tool]]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
        (folder / ".installed").touch()
    return python


def cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache")
    return base / "locater" / "bench" / f"python{sys.version_info.major}.{sys.version_info.minor}"
