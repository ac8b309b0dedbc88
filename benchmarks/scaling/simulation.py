"""A cluster in virtual time: jobs of a trace come, train with the nodes that a rule gives them, and end.

Jobs know their speed only as a real one does: with the numbers of nodes that they have had, after a while, with noise.
A change of the number costs time in which nothing is trained.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, quantiles
from typing import NamedTuple

from benchmarks.scaling.trace import TraceJob
from perdure.contract import Pace
from perdure.workflows.policy.capacity.throughput import Throughput

CHANGE_S = 30.0
"""Seconds of a change, as Pollux's paper takes them; Perdure's own measure less (docs/scaling.md)."""
SETTLE_S = 60.0
LOOK_S = 60.0
"""Seconds between two looks of a rule, beside those when a job comes or ends."""
_NOISE = 0.02
"""Of the median of a measurement whose steps vary by 10 %."""
_FEWEST, _MOST = 4, 4
"""A job may have from a quarter to four times of what it asked for."""


@dataclass
class Running:
    """A job of the trace while it waits and trains."""

    job: TraceJob
    nodes: int = 0
    done: float = 0.0
    """Seconds that its work would have taken with the nodes that it asked for."""
    started: float | None = None
    busy_until: float = 0.0
    """The end of its change."""
    since: float = 0.0
    """When it began to train with this number."""
    node_seconds: float = 0.0
    changes: int = 0
    most_had: int = 0
    paces: dict[int, Pace] = field(default_factory=dict[int, Pace])
    throughput: Throughput = field(default_factory=lambda: Throughput((), global_batch=True))
    """What these say."""

    @property
    def fewest(self) -> int:
        return max(self.job.asked // _FEWEST, 1)

    @property
    def rest(self) -> float:
        return self.job.duration - self.done

    def most(self, nodes: int) -> int:
        return min(self.job.asked * _MOST, nodes)

    def end(self, now: float) -> float:
        """When it ends, if nothing changes."""
        return max(now, self.busy_until) + self.rest * self.job.step(self.nodes) if self.nodes else float("inf")

    def advance(self, now: float, until: float, noise: Callable[[], float]) -> None:
        self.node_seconds += self.nodes * (until - now)
        if not self.nodes:
            return
        self.done += max(until - max(now, self.busy_until), 0.0) / self.job.step(self.nodes)
        if until - self.since >= SETTLE_S and self.nodes not in self.paces:
            step = self.job.step(self.nodes) * noise()
            self.paces[self.nodes] = Pace(nodes=self.nodes, step=step, generation=self.changes + 1)
            self.throughput = Throughput(list(self.paces.values()), global_batch=True)

    def give(self, nodes: int, now: float) -> None:
        if nodes == self.nodes:
            return
        if self.started is None:
            self.started = now
        self.nodes, self.since, self.busy_until = nodes, now + CHANGE_S, now + CHANGE_S
        self.changes += 1
        self.most_had = max(self.most_had, nodes)


Rule = Callable[[Sequence[Running], int, float], dict[str, int]]
"""Gives each job that has come and not ended its number of nodes, at a time: jobs, nodes of the cluster, time."""


class Result(NamedTuple):
    """What became of a trace."""

    completions: dict[str, float]
    """Seconds from submission to end, by job."""
    mean: float
    p99: float
    wait: float
    """Seconds until the first nodes, in the mean."""
    utilisation: float
    """The share of the nodes' time until the last end in which they belonged to a job."""
    node_hours: float
    changes: float
    """Of a job, its start apart, in the mean."""


def simulate(trace: Sequence[TraceJob], nodes: int, rule: Rule, *, seed: int = 0) -> Result:
    """Plays a trace."""
    source = random.Random(seed)
    coming = sorted(trace, key=lambda job: job.submitted)[::-1]
    live: list[Running] = []
    ended: list[tuple[Running, float]] = []
    now = next_look = 0.0
    while coming or live:
        times = [coming[-1].submitted] if coming else []
        times += [min(one.end(now) for one in live), next_look] if live else []
        until = max(min(times), now)
        for one in live:
            one.advance(now, until, lambda: source.gauss(1, _NOISE))
        now = until
        over = [one for one in live if one.rest <= 1e-6]
        ended += [(one, now - one.job.submitted) for one in over]
        live = [one for one in live if one.rest > 1e-6]
        while coming and coming[-1].submitted <= now:
            live.append(Running(coming.pop()))
        given = rule(live, nodes, now)
        assert sum(given.values()) <= nodes
        for one in live:
            one.give(given.get(one.job.name, one.nodes), now)
        next_look = now + LOOK_S
    times = [time for _, time in ended]
    return Result(
        completions={one.job.name: time for one, time in ended},
        mean=mean(times),
        p99=quantiles(times, n=100)[98],
        wait=mean((one.started or 0.0) - one.job.submitted for one, _ in ended),
        utilisation=sum(one.node_seconds for one, _ in ended) / (nodes * now),
        node_hours=sum(one.node_seconds for one, _ in ended) / 3600,
        changes=mean(one.changes - 1 for one, _ in ended),
    )
