"""A headless Chromium for the tests of the report, and for the picture of it in the documentation.

    python tests/report_browser.py            writes docs/images/report.png anew

The browser is the system's own; Playwright brings none. SPECMODEL_CHROMIUM names one that is not on the path.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "report.png"
NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")


def chromium() -> str | None:
    """Return the path of a Chromium, or None."""
    stated = os.environ.get("SPECMODEL_CHROMIUM")
    return stated or next((found for name in NAMES if (found := shutil.which(name))), None)


@contextlib.contextmanager
def launched() -> Iterator[Browser]:
    """A browser that runs until the end of the block."""
    from playwright.sync_api import sync_playwright

    path = chromium()
    if path is None:
        raise RuntimeError("no Chromium is installed")
    with sync_playwright() as playwright:
        # As root, as in a container, Chromium runs without its sandbox only; it is shown our own pages.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


def main() -> None:
    """Take the picture of the documentation."""
    import specmodel as sm

    model = sm.fit(sm.load(ROOT / "calibrations/seed/kimi-k2.5-eagle3-8x-rtx-pro-6000.yaml"))
    with tempfile.TemporaryDirectory() as folder, launched() as browser:
        file = Path(folder) / "report.html"
        file.write_text(sm.report(model), encoding="utf-8")
        page = browser.new_page(viewport={"width": 1120, "height": 1330}, color_scheme="light")
        page.goto(file.as_uri())
        page.screenshot(path=PICTURE)
    sys.stdout.write(f"{PICTURE.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
