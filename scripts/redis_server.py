"""Provides Redis for tests."""

from __future__ import annotations

from pathlib import Path

from perdure.local.go_build import Report
from scripts.debian import ensure_program

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
    return ensure_program(_NAMES, DEBIAN_PACKAGE, report)
