"""Provides a real browser for tests: one on PATH, else Debian's package, which is installed once per machine."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from perdure.local.go_build import Report
from scripts.cluster.binaries import CACHE, BinariesMissing, exclusive, install_packages

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""Programs that take Chromium's options."""

DEBIAN_PACKAGE = "chromium-headless-shell"
"""Chromium without windows."""


def ensure_browser(report: Report) -> Path:
    """Returns the browser's path.

    Raises:
        BinariesMissing: if there is none and none can be installed.
    """
    if found := _find():
        return found
    with exclusive(CACHE / "packages.lock"):
        if not _find():
            started = time.monotonic()
            install_packages([DEBIAN_PACKAGE], report)
            report(f"  done in {time.monotonic() - started:.0f} s")
    if found := _find():
        return found
    raise BinariesMissing(f"no browser: put one of {', '.join(NAMES)} on PATH")


def _find() -> Path | None:
    return next((Path(path) for name in NAMES if (path := shutil.which(name))), None)
