"""The job of `examples/09-reinforcement-learning` on this machine: starts it, kills its parts, and sees when they work.

The demo of roles, its benchmark and its test share this module.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import yaml

from examples.demo.faults import kill_node, kill_rank, processes_of_node
from examples.demo.trajectories import put_by, read_made, read_trained
from perdure.base.errors import PerdureError
from perdure.client.client import Client
from perdure.contract import JobResult

EXAMPLE = Path(__file__).parents[1] / "09-reinforcement-learning"
TRAINER, ROLLOUT, REWARD = "trainer", "rollout", "reward"
WITHIN = 240.0
"""Seconds in which a part works again on a busy machine."""
END_WITHIN = 60.0
"""Seconds in which a cancelled job has ended."""
_LOOK = 0.05

Condition: TypeAlias = Callable[[], Awaitable[bool]]


@dataclass(frozen=True)
class Fault:
    """A part that was killed, and what came of it."""

    role: str
    fault: str
    began: float
    """The time of the kill."""
    recovered_s: float
    paused_s: float
    """Seconds from the kill to the next step that was not begun before it: the whole job's loss, where the other roles
    have work meanwhile less than the part's own."""
    other_restarts: int
    """Processes of other roles, and of other nodes of a service, that ended."""
    lost: int
    doubled: int


class Learning:
    """One run of the job."""

    within = WITHIN

    def __init__(self, client: Client, out: Path, *, steps: int, name: str = "learning") -> None:
        self.out = out
        self.name = name
        self.uid = ""
        self._client = client
        self._steps = steps
        self._port = 0
        self._nodes: dict[str, int] = {}

    async def start(self) -> None:
        """Submits the job, and waits until it has learned for some steps."""
        self.out.mkdir(parents=True)
        job: dict[str, Any] = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
        job["name"] = self.name
        job["env"] |= {"OUT": str(self.out), "STEPS": str(self._steps), "PYTHONDONTWRITEBYTECODE": "1"}
        self._nodes = {role: fields["nodes"] for role, fields in job["roles"].items()}
        self.place(job)
        await self._client.submit(job)
        self.uid = (await self._client.status(self.name)).uid
        await self._until(_in_thread(lambda: self.step >= 5), "the first steps")

    def place(self, job: dict[str, Any]) -> None:
        """Completes the specification with what the backend needs."""
        job["workdir"] = {"path": str(EXAMPLE)}
        self._port = free_ports(sum(self._nodes.values()))
        job["roles"][REWARD]["ready"]["port"] = self._port
        job["roles"][ROLLOUT]["ready"]["port"] = self._port + 1

    async def lose_node(self, role: str, node: int) -> None:
        """Takes a node away without warning."""
        await asyncio.to_thread(kill_node, self.uid, role, node)

    async def reward_address(self) -> tuple[str, int] | None:
        """Returns where the reward model is to be called; None while it has no address."""
        return "127.0.0.1", self._port

    @property
    def step(self) -> int:
        """The newest step that was begun."""
        return max((made.step for made in read_made(self.out)), default=0)

    @property
    def score(self) -> float:
        """The return that was reached."""
        return float((self.out / "return").read_text())

    async def kill(self, role: str, node: int, *, whole_node: bool) -> Fault:
        """Kills a rank or a node, and waits until it works again."""
        before, others = read_trained(self.out), self._processes(without=role, node=node)
        works = self._works_again(role, node)
        began = time.time()
        if whole_node:
            await self.lose_node(role, node)
        else:
            await asyncio.to_thread(kill_rank, self.uid, role, node)
        at = await self._until(works, f"{role} {node}")
        # Until the next step, what counts as consumed may be that of a step which the trainer makes again.
        newest = self.step
        await self._until(_in_thread(lambda: self.step > newest + 1), f"a step after {role} {node} works again")
        after = read_trained(self.out)
        return Fault(
            role=role,
            fault="node" if whole_node else "rank",
            began=began,
            recovered_s=round(at - began, 2),
            paused_s=round(self._next_step(began) - began, 2),
            other_restarts=len(others - self._processes(without=role, node=node)),
            lost=after.lost - before.lost,
            doubled=after.doubled - before.doubled,
        )

    def _next_step(self, since: float) -> float:
        """Returns the time of the first new step after a time, whose step is no repetition."""
        known = max((made.step for made in read_made(self.out) if made.time < since), default=0)
        return min((made.time for made in read_made(self.out) if made.step > known), default=since)

    async def wait(self) -> JobResult:
        """Waits for the end of the job."""
        return await self._client.wait(self.name)

    async def end(self) -> None:
        """Ends the job, if it runs, and all its processes. The worker shuts them down, so it must run still."""
        with suppress(PerdureError, TimeoutError):
            async with asyncio.timeout(END_WITHIN):
                await self._client.cancel(self.name)
                await self._client.wait(self.name)
        for role, nodes in self._nodes.items():
            for node in range(nodes if self.uid else 0):
                await asyncio.to_thread(kill_node, self.uid, role, node)

    def _works_again(self, role: str, node: int) -> Condition:
        """Returns a function that tells whether a part that is killed after this call works again."""
        if role == TRAINER:
            generation = max(made.generation for made in read_made(self.out))
            return _in_thread(lambda: any(made.generation > generation for made in read_made(self.out)))
        old = self._pids(role, node)
        if role == ROLLOUT:
            # The number is read once the new process runs, which plays on from it.
            numbers: list[int] = []

            def plays() -> bool:
                if not numbers and self._pids(role, node) - old:
                    numbers.append(put_by(self.out, node))
                return bool(numbers) and put_by(self.out, node) > numbers[0]

            return _in_thread(plays)

        async def answers() -> bool:
            # The process that was killed may answer once more.
            if await asyncio.to_thread(self._pids, role, node) <= old:
                return False
            address = await self.reward_address()
            return address is not None and await asyncio.to_thread(_greets, address)

        return answers

    def _pids(self, role: str, node: int) -> set[int]:
        found: set[int] = set()
        for process in processes_of_node(self.uid, role, node):
            with suppress(psutil.Error):
                if "LOCAL_RANK" in process.environ() and "GROUP_RANK" in process.environ():
                    found.add(process.pid)
        return found

    def _processes(self, *, without: str, node: int) -> set[int]:
        """Returns the ranks that a fault of this node should not end: those of a trainer restart together."""
        spared = [
            (role, number)
            for role, nodes in self._nodes.items()
            for number in range(nodes)
            if role != without or (role != TRAINER and number != node)
        ]
        return {pid for role, number in spared for pid in self._pids(role, number)}

    async def _until(self, condition: Condition, what: str) -> float:
        """Returns the time at which the condition holds.

        Raises:
            TimeoutError: if it does not in time.
        """
        end = time.monotonic() + self.within
        while not await condition():
            if time.monotonic() >= end:
                raise TimeoutError(f"waited {self.within:.0f} s for {what}")
            await asyncio.sleep(_LOOK)
        return time.time()


def _in_thread(looks: Callable[[], bool]) -> Condition:
    return lambda: asyncio.to_thread(looks)


def _greets(address: tuple[str, int]) -> bool:
    """Returns whether a process that other roles can call is at the address: it speaks first."""
    with suppress(OSError), socket.create_connection(address, 1) as connection:
        return bool(connection.recv(1))
    return False


def free_ports(count: int) -> int:
    """Returns the first of so many ports in a row that nothing uses."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as server:
            first = server.getsockname()[1]
        with suppress(OSError, OverflowError):
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
            return first
