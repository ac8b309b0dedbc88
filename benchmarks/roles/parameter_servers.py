"""The kind `parameter-servers`: the job of `examples/10-parameter-servers` with real TensorFlow, on this machine."""

from __future__ import annotations

import asyncio
import re
import socket
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import yaml

from examples.demo.faults import kill_node, kill_rank, processes_of_node
from examples.demo.learning import free_ports
from perdure.base.errors import PerdureError
from perdure.client.client import Client
from scripts.tensorflow import RELEASES, interpreter

from .records import ENDLESS, Case

KIND = "parameter-servers"
EXAMPLE = Path(__file__).parents[2] / "examples" / "10-parameter-servers"
CHIEF, WORKER, SERVER, EVALUATOR = "chief", "worker", "ps", "evaluator"
NODES = {CHIEF: 1, WORKER: 2, SERVER: 2, EVALUATOR: 1}
VICTIMS = [(role, whole_node) for whole_node in (False, True) for role in NODES]
DECLARED = {SERVER: {CHIEF}}
"""The roles that the preset starts again with one."""
WITHIN = 240.0
"""Seconds in which a part works again on a busy machine: the import of TensorFlow alone can take ten."""
END_WITHIN = 60.0
SETTLE = 3.0
_LOOK = 0.1


class Training:
    """One run of the job."""

    def __init__(self, client: Client, out: Path) -> None:
        self.out = out
        self.name = f"servers-{int(time.time()) % 100_000}"
        self.uid = ""
        self._client = client
        self._ports: dict[str, int] = {}

    async def start(self) -> None:
        """Submits the job, and waits for its first checkpoints."""
        self.out.mkdir(parents=True)
        job: dict[str, Any] = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
        job["name"] = self.name
        job["workdir"] = {"path": str(EXAMPLE)}
        job["env"] = {
            "OUT": str(self.out),
            "EPOCHS": str(ENDLESS),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        python = await asyncio.to_thread(interpreter, RELEASES[-1])
        job["roles"][WORKER]["command"] = [str(python), "train.py"]
        first = free_ports(NODES[WORKER] + NODES[SERVER])
        self._ports = {WORKER: first, SERVER: first + NODES[WORKER]}
        for role, port in self._ports.items():
            job["roles"][role]["ready"] = {"port": port}
        await self._client.submit(job)
        self.uid = (await self._client.status(self.name)).uid
        await self._until(lambda: self.saved >= 2, "the first checkpoints")

    @property
    def saved(self) -> int:
        """The number of the newest checkpoint."""
        with suppress(OSError):
            if found := re.search(r'model_checkpoint_path: ".*ckpt-(\d+)"', (self.out / "checkpoint").read_text()):
                return int(found[1])
        return 0

    async def kill(self, role: str, *, whole_node: bool) -> Case:
        """Kills the last node of a role or its process, and waits until it works again and the training continues."""
        node = NODES[role] - 1
        before, old, others = await self.epochs(), self._pids(role, node), self._others(role, node)
        newest = await self._evaluated()
        began = time.monotonic()
        await asyncio.to_thread(kill_node if whole_node else kill_rank, self.uid, role, node)
        await self._until(lambda: not self._pids(role, node) <= old, f"a process of {role}")
        if role in self._ports:
            await self._until(lambda: _accepts(self._ports[role] + node), f"the port of {role}")
        if role == EVALUATOR:

            async def evaluates() -> bool:
                return await self._evaluated() > newest

            await self._until(evaluates, "an evaluation")
        if role == SERVER:
            # What is saved before the chief has started again is not from the new server.
            await self._until(lambda: not self._pids(CHIEF, 0) <= others[CHIEF, 0], "the chief")
        if role in (CHIEF, SERVER):
            saved = self.saved
            await self._until(lambda: self.saved > saved, "a checkpoint")
        recovered = time.monotonic() - began
        saved = self.saved
        await self._until(lambda: self.saved >= saved + 2, "two more checkpoints")
        after = await self.epochs()
        ended = {
            place
            for place, known in others.items()
            if place[0] not in DECLARED.get(role, ()) and known - self._pids(*place)
        }
        return Case(
            backend="local",
            kind=KIND,
            role=role,
            fault="node" if whole_node else "rank",
            recovered_s=round(recovered, 2),
            other_restarts=len(ended),
            # A new node of the chief has a log of its own, which does not tell what the old one had made.
            lost=None if role == CHIEF and whole_node else lost(after) - lost(before),
            doubled=None if role == CHIEF and whole_node else doubled(after) - doubled(before),
        )

    async def end(self) -> None:
        """Ends the job, if it runs, and all its processes."""
        with suppress(PerdureError, TimeoutError):
            async with asyncio.timeout(END_WITHIN):
                await self._client.cancel(self.name)
                await self._client.wait(self.name)
        for role, nodes in NODES.items():
            for node in range(nodes if self.uid else 0):
                await asyncio.to_thread(kill_node, self.uid, role, node)

    async def epochs(self) -> list[str]:
        """Returns the chief's lines about epochs and starts."""
        return [line async for line in self._lines(CHIEF) if re.match(r"(epoch|starts after epoch) \d+", line)]

    async def _evaluated(self) -> int:
        """Returns the newest epoch that was evaluated: a new node has lines of its own only."""
        lines = [line async for line in self._lines(EVALUATOR) if line.startswith("evaluated epoch")]
        return max(map(_number, lines), default=0)

    async def _lines(self, role: str) -> AsyncGenerator[str]:
        async for line in self._client.logs(self.name, role=role):
            yield line.text

    def _pids(self, role: str, node: int) -> set[int]:
        found: set[int] = set()
        for process in processes_of_node(self.uid, role, node):
            with suppress(psutil.Error):
                if "LOCAL_RANK" in process.environ():
                    found.add(process.pid)
        return found

    def _others(self, role: str, node: int) -> dict[tuple[str, int], set[int]]:
        """Returns the processes of all other nodes."""
        places = [(name, number) for name, nodes in NODES.items() for number in range(nodes)]
        return {place: self._pids(*place) for place in places if place != (role, node)}

    async def _until(self, condition: Callable[[], bool | Awaitable[bool]], what: str) -> None:
        """Waits until the condition holds.

        Raises:
            TimeoutError: if it does not in time.
        """
        end = time.monotonic() + WITHIN
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            if time.monotonic() >= end:
                raise TimeoutError(f"waited {WITHIN:.0f} s for {what}")
            await asyncio.sleep(_LOOK)


def lost(lines: list[str]) -> int:
    """Returns the epochs that the model does not contain, of those before the chief's last one.

    An epoch is in the model if the chief has printed it, or if a chief has started after it: the checkpoint is first.
    """
    seen = {_number(line) for line in lines}
    return sum(number not in seen for number in range(1, max(seen, default=0)))


def doubled(lines: list[str]) -> int:
    """Returns the epochs that were trained again after a checkpoint had them."""
    counts = Counter(_number(line) for line in lines if line.startswith("epoch"))
    return sum(count - 1 for count in counts.values())


def _number(line: str) -> int:
    found = re.search(r"epoch (\d+)", line)
    assert found, line
    return int(found[1])


def _accepts(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@asynccontextmanager
async def training(client: Client) -> AsyncGenerator[Training]:
    """Provides a job that trains, and ends it."""
    with tempfile.TemporaryDirectory(prefix="pp-", ignore_cleanup_errors=True) as folder:
        job = Training(client, Path(folder) / "out")
        try:
            await job.start()
            yield job
        finally:
            await job.end()


async def cases(client: Client, say: Callable[[str], None], *, rounds: int) -> list[Case]:
    """Kills each role's process and node, one after another."""
    found: list[Case] = []
    async with training(client) as job:
        for role, whole_node in VICTIMS * rounds:
            await asyncio.sleep(SETTLE)
            try:
                case = await job.kill(role, whole_node=whole_node)
            except (TimeoutError, LookupError) as problem:
                fault = "node" if whole_node else "rank"
                case = Case(backend="local", kind=KIND, role=role, fault=fault, problem=str(problem))
            say(f"{KIND}, {role} {case.fault}: {case.recovered_s} s {case.problem}")
            found.append(case)
    return found


def seconds_of(cases: list[Case], role: str) -> float | None:
    """Returns the median of the seconds after a process of a role was killed."""
    seconds = [
        case.recovered_s
        for case in cases
        if (case.kind, case.role, case.fault) == (KIND, role, "rank") and case.recovered_s is not None
    ]
    return round(median(seconds), 2) if seconds else None
