"""Provides a real browser for tests."""

from __future__ import annotations

from pathlib import Path

from perdure.local.go_build import Report
from scripts.debian import ensure_program

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""Programs that take Chromium's options."""

DEBIAN_PACKAGE = "chromium-headless-shell"
"""Chromium without windows."""


def ensure_browser(report: Report) -> Path:
    """Returns the browser's path.

    Raises:
        BinariesMissing: if there is none and none can be installed.
    """
    return ensure_program(NAMES, DEBIAN_PACKAGE, report)
