"""Real file systems that are too small."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(mount: Path, size: str) -> Iterator[Path]:
    """Mounts a tmpfs of this size, such as "64k"; skips the test where that is not possible."""
    mount.mkdir(exist_ok=True)
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("mounting a small file system takes root")
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mount)]
    if subprocess.run(mounting, check=False, capture_output=True).returncode:
        pytest.skip("this machine does not let tests mount a file system")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", mount], check=True)
