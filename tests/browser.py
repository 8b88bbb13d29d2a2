"""A real Chromium without a window for all tests that look at pages; what it requests and complains of is kept."""

import json
import shutil
import tempfile
import time
from pathlib import Path

import axe_core_python
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

# Kept for people to look at, by the name of the page; git ignores the folder, and the end of a test run names it.
SCREENSHOTS = Path(__file__).parent / "screenshots"
FLAGS = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "window-size=1300,1000"]
FLAGS += ["disable-background-networking", "disable-component-update", "disable-sync"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
DRIVERS = ("chromedriver", "chromium.chromedriver")


def on_path(names: tuple[str, ...]) -> str | None:
    """The first program of these names that there is."""
    return next(filter(None, map(shutil.which, names)), None)


def missing() -> str | None:
    """What to install before pages can be tested."""
    if on_path(BROWSERS) and on_path(DRIVERS):
        return None
    return "tests of pages need Chromium and its driver on PATH: apt-get install chromium chromium-driver, as root"


class Browser:
    """`open` waits until the page says that it is ready; `run` is JavaScript whose last `return` comes back."""

    def __init__(self, folder: Path):
        options = webdriver.ChromeOptions()
        options.binary_location = on_path(BROWSERS)
        for flag in (*FLAGS, f"user-data-dir={tempfile.mkdtemp(dir=folder)}"):
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(on_path(DRIVERS)))
        self.driver.set_script_timeout(30)
        self.downloads = folder / "downloads"
        self.downloads.mkdir()
        allowed = {"behavior": "allow", "downloadPath": str(self.downloads)}
        self.driver.execute_cdp_cmd("Browser.setDownloadBehavior", allowed)

    def open(self, path: Path, *, width: int = 1300, dark: bool = False) -> float:
        """Seconds until the page was ready."""
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": theme})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.complaints(), self.requests()
        start = time.monotonic()
        self.driver.get(path.as_uri())
        self.wait("return document.documentElement.dataset.ready === 'yes'")
        return time.monotonic() - start

    def run(self, script: str, *arguments: object):
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f"still not: {script}\n{self.complaints()}"
            time.sleep(0.02)

    def complaints(self) -> list[str]:
        """What the console said since it was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """The addresses asked for since last time, the page itself and what lies within it apart."""
        messages = (json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance"))
        sent = [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        return [address for address in sent if not address.startswith(("file:", "data:", "blob:"))]

    def downloaded(self, name: str, seconds: float = 30) -> bytes:
        """Chromium reserves the name with an empty file before it moves the content there."""
        path, end = self.downloads / name, time.monotonic() + seconds
        while not path.exists() or not path.stat().st_size:
            assert time.monotonic() < end, f"{name} did not arrive, but {list(self.downloads.iterdir())}"
            time.sleep(0.05)
        content = path.read_bytes()
        path.unlink()
        return content

    def picture(self, path: Path) -> None:
        """What the window shows."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(path))

    def keep(self, name: str) -> None:
        """The whole page from top to bottom, among the screenshots."""
        width, height = self.run(
            "return [innerWidth, Math.ceil(document.documentElement.getBoundingClientRect().height)]"
        )
        size = {"width": width, "height": min(height, 8000), "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.picture(SCREENSHOTS / f"{name}.png")


def serious_faults(browser: Browser) -> list[tuple[str, str]]:
    """What axe-core calls serious or critical on the page that is open, each with the first place."""
    browser.run((Path(axe_core_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    found = browser.driver.execute_async_script(
        "const done = arguments[0]; axe.run({resultTypes: ['violations']}).then((r) => done(r.violations))"
    )
    return [(one["id"], one["nodes"][0]["html"][:200]) for one in found if one["impact"] in ("serious", "critical")]
