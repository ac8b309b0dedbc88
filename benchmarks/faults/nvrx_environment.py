"""Installs NVIDIA's resiliency extension into an environment of its own, which all checkouts share."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from benchmarks.recovery.dlrover_environment import make
from scripts.setup import CACHE

VERSION = "0.4.1"
"""The newest release with wheels for Python 3.11 and for glibc before 2.39."""
MODULES = ("nvidia_resiliency_ext.fault_tolerance.launcher",)


async def ensure() -> Path:
    """Returns the `bin` folder of an environment with NVRx and the torch release that Perdure's ranks use.

    Raises:
        NotAvailable: if NVRx cannot be installed or imported.
    """
    torch = importlib.metadata.version("torch")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = [f"nvidia-resiliency-ext=={VERSION}", f"torch=={torch}"]
    return await make(CACHE / "nvrx" / f"{VERSION}-torch-{torch}-python-{python}", packages, MODULES)
