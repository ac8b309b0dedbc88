"""Backends for the demo's nodes; the demo is the same on each. This module has the one for local processes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from examples.demo.faults import kill_node
from perdure.base.state_folder import StateFolder
from perdure.local.control_plane import LocalControlPlane, Report

NAME = "demo"
"""The job's name."""
ROLE = "worker"
OUT = "out"
"""The folder for the training's results, in the demo's folder."""
SCRIPT = Path(__file__).with_name("train.py")


class Place(Protocol):
    """The parts of the demo that depend on the backend."""

    control_plane: LocalControlPlane
    node_fault: str
    """The fault that takes a node away, for messages."""

    def job(self, arguments: list[str]) -> dict[str, Any]:
        """Returns the job's specification without its name and node count."""
        ...

    async def lose_node(self, uid: str, rank: int) -> None:
        """Kills the first incarnation of a node."""
        ...


class Processes:
    """Runs nodes as processes of this machine."""

    node_fault = "kill -9 of a whole node"

    def __init__(self, control_plane: LocalControlPlane) -> None:
        self.control_plane = control_plane

    def job(self, arguments: list[str]) -> dict[str, Any]:
        role = {"command": ["torchrun", SCRIPT.name, *arguments]}
        return {"workdir": {"path": str(SCRIPT.parent)}, "roles": {ROLE: role}}

    async def lose_node(self, uid: str, rank: int) -> None:
        kill_node(uid, ROLE, rank)


@asynccontextmanager
async def processes(folder: Path, report: Report) -> AsyncGenerator[Place]:
    """Provides a server and a worker in a folder, and stops them when the context closes."""
    control_plane = LocalControlPlane(StateFolder(folder / "state"), report=report)
    async with ended(control_plane):
        yield Processes(control_plane)


@asynccontextmanager
async def ended(control_plane: LocalControlPlane) -> AsyncGenerator[None]:
    """Stops worker and server when the context closes."""
    try:
        yield
    finally:
        await control_plane.stop_worker()
        await control_plane.stop_server()


def cancel_on(*numbers: signal.Signals) -> None:
    """Has the first of these signals cancel the current task, as asyncio does on SIGINT.

    The demo then ends its processes; later signals change nothing, since they would interrupt that.
    """
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    ending = False

    def end() -> None:
        nonlocal ending
        if not ending:
            ending = True
            task.cancel()

    for number in numbers:
        # nohup has SIGHUP ignored, and it stays so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, end)
