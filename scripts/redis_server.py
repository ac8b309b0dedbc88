"""Provides Redis for tests: the server on PATH, else Debian's program, which is installed once per machine."""

from __future__ import annotations

import shutil
from pathlib import Path

from perdure.local.go_build import Report
from scripts.cluster.binaries import CACHE, BinariesMissing, exclusive, install_packages

DEBIAN_PACKAGE = "redis-tools"
"""The package with the server's program. `redis-server` only adds another name of it, and a service that runs."""

NAME = "redis-server"
"""The name by which the program has to be started: by another one it checks files."""
_NAMES = (NAME, "redis-check-rdb")


def ensure_redis(report: Report) -> Path:
    """Returns the program's path.

    Raises:
        BinariesMissing: if there is none and none can be installed.
    """
    if found := _find():
        return found
    with exclusive(CACHE / "packages.lock"):
        if not _find():
            install_packages([DEBIAN_PACKAGE], report)
    if found := _find():
        return found
    raise BinariesMissing(f"no Redis: put {NAME} on PATH")


def _find() -> Path | None:
    return next((Path(path) for name in _NAMES if (path := shutil.which(name))), None)
