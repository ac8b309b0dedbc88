"""Checks out the code of earlier releases from this repository's history, to put their workers under jobs."""

from __future__ import annotations

import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from tests.support.allocation import REPOSITORY

EARLIER = {"the last commit": "HEAD"}
"""Releases and their commits. No release has been made yet, so the last commit stands for one."""

FROZEN = {"0.3.0": "53b52f134fec78000593c6f9681efaf0010b3cd0"}
"""Releases whose histories are frozen, and the commits that froze them."""

_PATHS = (
    "pyproject.toml",
    "perdure",
    "workflows",
    "activities",
    "agent",
    "perdure_launcher",
    "perdure_training",
    "deploy",
)


def checked_out(release: str, folder: Path) -> Path:
    """A folder with the packages and the chart of an earlier release; the test is skipped where history lacks it."""
    command = ["git", "archive", "--format=tar", (EARLIER | FROZEN)[release], *_PATHS]
    archive = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False)
    if archive.returncode != 0:
        pytest.skip(f"the history of this checkout does not hold release {release}")
    code = folder / release.replace(" ", "-")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(code, filter="data")
    return code
