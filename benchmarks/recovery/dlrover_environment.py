"""Installs DLRover into an environment of its own: its dependencies conflict with Perdure's, and all checkouts share
it."""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.setup import CACHE, SetupFailed, find_uv

VERSION = "0.6.1"
UNDECLARED = ("protobuf",)
"""Packages that DLRover imports without declaring them."""
MODULES = ("dlrover.python.master.local_master", "dlrover.trainer.torch.elastic_run")
"""Modules of DLRover's two commands: if they can be imported, the commands start."""


class NotAvailable(Exception):
    """A peer cannot be measured here; the message says why."""


async def ensure() -> Path:
    """Returns the `bin` folder of an environment with DLRover and the torch release that Perdure's ranks use.

    Raises:
        NotAvailable: if DLRover cannot be installed or imported.
    """
    torch = importlib.metadata.version("torch")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = [f"dlrover[k8s,torch]=={VERSION}", f"torch=={torch}", *UNDECLARED]
    return await make(CACHE / "dlrover" / f"{VERSION}-torch-{torch}-python-{python}", packages, MODULES)


async def make(home: Path, packages: Sequence[str], modules: Sequence[str]) -> Path:
    """Returns the `bin` folder of an environment with these packages, which is made once.

    Args:
        home: Its folder, whose name has all versions.
        packages: The packages, with their versions.
        modules: Modules of the commands: if they can be imported, the commands start.

    Raises:
        NotAvailable: if a package cannot be installed or imported.
    """
    ready = home / "ready"
    if not ready.exists():
        try:
            uv = find_uv()
        except SetupFailed as failed:
            raise NotAvailable(str(failed)) from failed
        await _run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, home)
        await _run(uv, "pip", "install", "--quiet", "--python", home / "bin" / "python", *packages)
        await _run(home / "bin" / "python", "-c", f"import {', '.join(modules)}")
        ready.touch()
    return home / "bin"


async def _run(*command: str | Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    if process.returncode != 0:
        last = output.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        raise NotAvailable(f"`{' '.join(map(str, command))}` ended with {process.returncode}: {last[0]}")
