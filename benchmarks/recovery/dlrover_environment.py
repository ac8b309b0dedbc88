"""DLRover in an environment of its own: its dependencies are not ours, and one copy serves all checkouts."""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from pathlib import Path

from scripts.setup import CACHE, SetupFailed, find_uv

VERSION = "0.6.1"
UNDECLARED = ("protobuf",)
"""What it imports and does not ask for."""
MODULES = ("dlrover.python.master.local_master", "dlrover.trainer.torch.elastic_run")
"""What its two commands load: if these import, they start."""


class NotAvailable(Exception):
    """The message says why it cannot be measured here."""


async def ensure() -> Path:
    """The `bin` folder of an environment with DLRover and the torch that we run ourselves.

    Raises:
        NotAvailable: if it does not install or does not import.
    """
    torch = importlib.metadata.version("torch")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    home = CACHE / "dlrover" / f"{VERSION}-torch-{torch}-python-{python}"
    ready = home / "ready"
    if not ready.exists():
        try:
            uv = find_uv()
        except SetupFailed as failed:
            raise NotAvailable(str(failed)) from failed
        packages = [f"dlrover[k8s,torch]=={VERSION}", f"torch=={torch}", *UNDECLARED]
        await _run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, home)
        await _run(uv, "pip", "install", "--quiet", "--python", home / "bin" / "python", *packages)
        await _run(home / "bin" / "python", "-c", f"import {', '.join(MODULES)}")
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
