"""Provides programs for tests: those on PATH, else Debian's packages, which are installed once per machine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from perdure.local.go_build import Report
from scripts.cluster.binaries import CACHE, BinariesMissing, exclusive, install_packages


def ensure_program(names: Sequence[str], package: str, report: Report) -> Path:
    """Returns the path of the first program on PATH that has one of the names.

    Args:
        names: The names, best first.
        package: Debian's package that has it.
        report: Gets a line about an installation.

    Raises:
        BinariesMissing: if there is none and none can be installed.
    """
    if found := _find(names):
        return found
    with exclusive(CACHE / "packages.lock"):
        if not _find(names):
            started = time.monotonic()
            install_packages([package], report)
            report(f"  done in {time.monotonic() - started:.0f} s")
    if found := _find(names):
        return found
    raise BinariesMissing(f"no {package}: put one of {', '.join(names)} on PATH")


def _find(names: Sequence[str]) -> Path | None:
    return next((Path(path) for name in names if (path := shutil.which(name))), None)
