"""Identifies the version of Perdure's code, so that a worker with older code is replaced.

The release number is not enough: in a checkout the code changes without it.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

import perdure

_PACKAGES = ("perdure", "workflows", "activities", "agent", "perdure_launcher", "perdure_training")


@cache
def code_version() -> str:
    """The release, and a digest of the code's location and of each file's time of change."""
    root = Path(perdure.__file__).resolve().parent.parent
    digest = hashlib.sha256(str(root).encode())
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            facts = path.stat()
            digest.update(f"{path.relative_to(root)} {facts.st_mtime_ns} {facts.st_size}\n".encode())
    return f"{perdure.__version__}+{digest.hexdigest()[:12]}"


def is_of_newer_release(code: str) -> bool:
    """Whether a worker of this code is of a later release than this command.

    Such a worker can continue what this release began; this release could not continue what that worker has begun.
    """
    return _release(code) > _release(perdure.__version__)


def _release(code: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", code)
    return tuple(int(number) for number in match[0].split(".")) if match else ()
