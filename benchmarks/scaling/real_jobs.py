"""Real jobs on this machine whose steps follow a known law: what the choice cost, against the best number.

Server, worker, agents and launchers are real; the script sleeps, so that a node costs little.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from perdure.base.errors import Refused
from perdure.client.client import Client
from perdure.contract import Pace
from perdure.workflows.policy.capacity.throughput import Throughput

SCRIPT = Path(__file__).with_name("law.py")
NODES = range(1, 7)
MIN_EFFICIENCY = 0.05
"""So little that the number that is chosen is the fastest one, and time tells how good the choice is."""
SETTLE_S = 4.0
KEYS = ("regret_pct", "oscillations", "change_s", "lost_steps")
_LONGEST = 3.0
"""A job may take so many times as long as it should."""


@dataclass(frozen=True)
class Law:
    """Seconds of a step: those that the nodes share, and those that each node adds for all to agree."""

    compute: float
    exchange: float

    def step(self, nodes: int) -> float:
        """Returns the seconds of a step with so many nodes."""
        return self.compute / nodes + self.exchange * nodes

    @property
    def best(self) -> int:
        """The number that one who knows the law would choose."""
        paces = [Pace(nodes=nodes, step=self.step(nodes), generation=1) for nodes in NODES]
        return Throughput(paces, global_batch=True).efficient(NODES, MIN_EFFICIENCY) or NODES[0]


class Line(NamedTuple):
    """A step, as the first rank has written it."""

    time: float
    step: int
    nodes: int
    generation: int


class Figures(NamedTuple):
    """What became of one job."""

    law: Law
    sizes: tuple[int, ...]
    """The numbers of nodes of its worlds."""
    regret: float
    """How much longer it took than with the best number from its first step, as a share."""
    changes: tuple[float, ...]
    """Seconds of each change, beyond those of a step."""
    lost: int
    """Steps that were made twice or not at all."""

    @property
    def oscillations(self) -> int:
        """Worlds of a number that the job had before and left again."""
        return sum(size in self.sizes[:at] for at, size in enumerate(self.sizes[:-1]))


def laws(count: int, *, seed: int) -> list[Law]:
    """Makes laws whose fastest number is any one, or beyond the largest."""
    source = random.Random(seed)
    known = [(source.uniform(0.4, 0.8), source.uniform(1, NODES[-1] + 2)) for _ in range(count)]
    return [Law(compute, compute / fastest**2) for compute, fastest in known]


def specification(
    name: str, law: Law, folder: Path, *, steps: int, noise: float, min_efficiency: float = MIN_EFFICIENCY
) -> dict[str, Any]:
    """Returns a job that trains by a law, and writes into a folder."""
    options = {"--compute": law.compute, "--exchange": law.exchange, "--noise": noise, "--steps": steps}
    arguments = [str(part) for option in options.items() for part in option]
    scaling = {"policy": "efficient", "batch": "global", "min_efficiency": min_efficiency, "settle": f"{SETTLE_S}s"}
    return {
        "name": name,
        "workdir": {"path": str(folder)},
        "recovery": {"warm_starts": False},
        "timing": {"rendezvous": {"last_call": "15s"}, "stragglers": {"restart_cost": "2s"}},
        "roles": {
            "worker": {
                "nodes": f"{NODES[0]}:{NODES[-1]}",
                "command": [sys.executable, str(SCRIPT), str(folder), *arguments],
                "scaling": scaling,
            }
        },
    }


async def run(client: Client, law: Law, *, seconds: float, noise: float = 0.1) -> Figures:
    """Trains by a law for about so many seconds."""
    name = f"law-{secrets.token_hex(3)}"
    steps = round(seconds / law.step(law.best))
    with tempfile.TemporaryDirectory(prefix="ps-", ignore_cleanup_errors=True) as folder:
        await client.submit(specification(name, law, Path(folder), steps=steps, noise=noise))
        try:
            async with asyncio.timeout(_LONGEST * seconds + 60):
                await client.wait(name)
        finally:
            with suppress(Refused):
                await client.cancel(name)
        return judge(law, read(Path(folder) / "steps"), steps=steps)


def read(path: Path) -> list[Line]:
    """Reads what the first ranks have written."""
    rows = (line.split() for line in path.read_text().splitlines())
    return [Line(float(time), int(step), int(nodes), int(world)) for time, step, nodes, world in rows]


def judge(law: Law, lines: list[Line], *, steps: int) -> Figures:
    """Returns what became of a job that had so many steps to make."""
    changed = [(one, other) for one, other in pairwise(lines) if one.generation != other.generation]
    made = [line.step for line in lines]
    # The first step of a job begins before the first line.
    taken = lines[-1].time - lines[0].time + law.step(lines[0].nodes)
    return Figures(
        law=law,
        sizes=(lines[0].nodes, *(other.nodes for _, other in changed)),
        regret=taken / (steps * law.step(law.best)) - 1,
        changes=tuple(other.time - one.time - law.step(other.nodes) for one, other in changed),
        lost=len(made) - len(set(made)) + len(set(range(1, steps + 1)) - set(made)),
    )


async def run_all(
    client: Client, known: list[Law], *, seconds: float, together: int, say: Callable[[str], None]
) -> list[Figures]:
    """Runs a job for each law, some of them at once."""
    places = asyncio.Semaphore(together)

    async def one(law: Law) -> Figures:
        async with places:
            figures = await run(client, law, seconds=seconds)
        say(
            f"{law.compute:.3f}/n + {law.exchange:.3f}*n s: best {law.best}, had {list(figures.sizes)}, regret "
            f"{figures.regret:+.1%}, changes {', '.join(f'{change:.1f} s' for change in figures.changes)}"
        )
        return figures

    return await asyncio.gather(*map(one, known))


def summary(figures: list[Figures]) -> dict[str, float | int | None]:
    """Returns the figures of all jobs."""
    changes = [change for one in figures for change in one.changes]
    return {
        "regret_pct": round(100 * sum(max(one.regret, 0.0) for one in figures) / len(figures), 2),
        "oscillations": sum(one.oscillations for one in figures),
        "change_s": round(median(changes), 2) if changes else None,
        "lost_steps": sum(one.lost for one in figures),
    }
