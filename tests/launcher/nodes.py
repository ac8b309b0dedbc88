"""Runs real launchers on this machine, each with its own scripted agent, and forms worlds of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from perdure_launcher.system.processes import environment_of
from perdure_training.node_api.progress_file import RankProgress, progress_path, read_progress
from tests.launcher.agent_double import DEADLINE, AgentDouble, Post
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


class Node:
    """One launcher and its agent."""

    def __init__(self, command: Sequence[str], **config: Any) -> None:
        # Socket paths are short, so the run directory cannot be pytest's.
        self.run_directory = Path(tempfile.mkdtemp(prefix="pl-"))
        self.name = f"{secrets.token_hex(4)}/worker-0/1"
        self.agent = AgentDouble(self.run_directory / "agent.sock")
        self.launcher: subprocess.Popen[bytes] | None = None
        self.interpreter_arguments = ["-m", "perdure_launcher"]
        self.placed_by: list[str] = []
        """The command that starts the launcher, such as `nsenter` with a network namespace."""
        self.config: dict[str, Any] = {
            "command": list(command),
            "workdir": str(SCRIPTS),
            "env": {},
            "nodes": "1",
            "processes": 1,
            "rendezvous": "auto",
            "run_id": secrets.token_hex(4),
            "address": "127.0.0.1",
            "stop_grace_s": 1.0,
            "termination_grace_s": 5.0,
            "log_max_bytes": 1 << 20,
            **config,
        }

    def launch(self, **environment: str) -> None:
        path = self.run_directory / "launcher.json"
        path.write_text(json.dumps(self.config))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "PET_"))}
        with (self.run_directory / "launcher.log").open("ab") as log:
            self.launcher = subprocess.Popen(
                [*self.placed_by, sys.executable, *self.interpreter_arguments],
                cwd=ROOT,
                env={
                    **inherited,
                    "PYTHONPATH": str(ROOT),
                    "PERDURE_RUN_DIR": str(self.run_directory),
                    "PERDURE_NODE": self.name,
                    "PERDURE_LAUNCHER_CONFIG": str(path),
                    "OMP_NUM_THREADS": "1",
                    # No name server is asked, which torch would do for each connection.
                    "RES_OPTIONS": "attempts:0",
                    "TEST_STEPS_DIR": str(self.run_directory),
                    **environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def close(self) -> None:
        """Ends everything, and takes note of what it leaves behind."""
        if self.launcher and self.launcher.poll() is None:
            self.launcher.kill()
            await asyncio.to_thread(self.launcher.wait)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self.agent.stop()
        shutil.rmtree(self.run_directory, ignore_errors=True)

    async def left(self, *, within: float = DEADLINE) -> int:
        """Waits for the launcher's end."""
        assert self.launcher
        return await asyncio.to_thread(self.launcher.wait, within)

    @property
    def output(self) -> str:
        path = self.run_directory / "logs" / "output.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def launcher_log(self) -> str:
        return (self.run_directory / "launcher.log").read_text(errors="replace")

    def processes(self, where: Callable[[dict[str, str]], bool] = lambda _: True) -> list[int]:
        """Living processes of this node, by the name in their environment."""
        found: list[int] = []
        for name in os.listdir("/proc"):
            if not name.isdecimal() or not (environment := environment_of(int(name))):
                continue
            if environment.get("PERDURE_NODE") == self.name and where(environment):
                found.append(int(name))
        return found

    def ranks(self, generation: int | None = None) -> dict[int, int]:
        """Processes of this node's ranks, by global rank, as their progress files say."""
        found: dict[int, int] = {}
        for path in (self.run_directory / "progress").glob("rank-*"):
            progress = read_progress(path)
            if progress and (generation is None or progress.generation == generation):
                found[int(path.name.removeprefix("rank-"))] = progress.pid
        return found

    async def stepped(self, rank: int, generation: int, *, steps: int = 3, within: float = DEADLINE) -> RankProgress:
        """Waits until a rank has made some steps in a generation."""

        def progress() -> RankProgress | None:
            found = read_progress(progress_path(self.run_directory / "progress", rank))
            return found if found and found.generation == generation and found.step >= steps else None

        return await eventually(progress, within=within, what=lambda: f"{self.output[-3000:]}\n{self.launcher_log}")


@contextlib.asynccontextmanager
async def running(*nodes: Node, start_agents: bool = True) -> AsyncIterator[None]:
    """Launches nodes, and ends them whatever happens."""
    try:
        for node in nodes:
            if start_agents:
                await node.agent.start()
            node.launch()
        yield
    except BaseException:
        for node in nodes:
            print(f"--- {node.name}\n{node.output[-4000:]}\n--- launcher\n{node.launcher_log[-4000:]}")
        raise
    finally:
        for node in nodes:
            await node.close()


READY = "/v1/rendezvous/ready"
ENTERED = "/v1/rendezvous/entered"
FINISHED = "/v1/rendezvous/finished"
EXITED = "/v1/launcher/exited"


async def all_ready(*nodes: Node, path: str = READY) -> list[Post]:
    """Waits until every node asks for a world."""
    return list(await asyncio.gather(*(node.agent.heard(path) for node in nodes)))


Processes = int | Sequence[int]
"""The number of processes of every node, or of each node in order."""


def ranks_by_node(nodes: Sequence[Node], processes: Processes) -> list[range]:
    """The global ranks of nodes in this order."""
    counts = [processes] * len(nodes) if isinstance(processes, int) else processes
    return [range(end - count, end) for count, end in zip(counts, itertools.accumulate(counts), strict=True)]


def world_of(nodes: Sequence[Node], generation: int, *, port: int, processes: Processes = 1) -> list[dict[str, Any]]:
    """Returns each node's message about a world of these nodes, in this order; the first hosts the store."""
    ranks = ranks_by_node(nodes, processes)
    return [
        {
            "generation": generation,
            "nodes": len(nodes),
            "group_rank": index,
            "base_rank": own.start,
            "world_size": ranks[-1].stop,
            "store_address": nodes[0].config["address"],
            "store_port": port,
            "store_host": index == 0,
        }
        for index, own in enumerate(ranks)
    ]


async def form_world(
    nodes: Sequence[Node], generation: int, *, port: int, processes: Processes = 1, stage: int = 0
) -> None:
    """Hands out a world of these nodes, in this order; the first one hosts the store on one of its ports."""
    for node, world in zip(nodes, world_of(nodes, generation, port=port, processes=processes), strict=True):
        await node.agent.apply(world | {"stage": stage})


async def first_world(nodes: Sequence[Node], *, processes: Processes = 1, path: str = READY) -> list[Post]:
    """Brings new nodes up to stepping ranks of generation 1."""
    ready = await all_ready(*nodes, path=path)
    await form_world(nodes, 1, port=ready[0].body["store_ports"][0], processes=processes)
    await all_step(nodes, 1, processes=processes)
    return ready


async def all_step(nodes: Sequence[Node], generation: int, *, processes: Processes = 1) -> None:
    places = zip(nodes, ranks_by_node(nodes, processes), strict=True)
    await asyncio.gather(*(node.stepped(rank, generation) for node, ranks in places for rank in ranks))
