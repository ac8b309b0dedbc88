"""Checks out the code of earlier releases from this repository's history."""

from __future__ import annotations

import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from tests.support.allocation import REPOSITORY

EARLIER = {"0.1.0": "706b6f936ef19133eb4e35340120ef1fa1b99756"}
"""Releases whose workers are put under jobs, and their commits."""

_PATHS = ("perdure", "workflows", "activities", "agent", "perdure_launcher", "deploy")


def checked_out(release: str, folder: Path) -> Path:
    """A folder with the packages and the chart of an earlier release; the test is skipped where history lacks it."""
    command = ["git", "archive", "--format=tar", EARLIER[release], *_PATHS]
    archive = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False)
    if archive.returncode != 0:
        pytest.skip(f"the history of this checkout does not hold release {release}")
    code = folder / release
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(code, filter="data")
    return code
