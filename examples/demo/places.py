"""Where the demo's nodes are; its story is the same everywhere. This machine's own processes are one such place."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from examples.demo.faults import kill_node
from perdure.local.control_plane import LocalControlPlane, Report
from perdure.state_folder import StateFolder

NAME = "demo"
"""The job's."""
ROLE = "worker"
OUT = "out"
"""In the demo's folder: what the training writes."""
SCRIPT = Path(__file__).with_name("train.py")


class Place(Protocol):
    """What differs from place to place."""

    control_plane: LocalControlPlane
    node_fault: str
    """How a node is lost here, for people."""

    def job(self, arguments: list[str]) -> dict[str, Any]:
        """The job's specification, but for its name and the number of its nodes."""
        ...

    async def lose_node(self, uid: str, rank: int) -> None:
        """Takes the first incarnation of one node away."""
        ...


class Processes:
    """Nodes are processes of this machine."""

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
    """A server and a worker in a folder, gone when the context closes."""
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
