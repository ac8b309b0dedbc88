"""Rules that give jobs their nodes: Perdure's, and those that it is compared with, written from their papers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from heapq import heapify, heappop, heapreplace

from benchmarks.scaling.simulation import CHANGE_S, Running
from perdure.workflows.policy.capacity.first_come import Order, follow
from perdure.workflows.policy.capacity.sharing import SharingJob, share

_BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
"""Of virtual time, which counts seconds."""
_RM_EVERY = 300.0
_RM_ADDED, _RM_LEAST = 8, 0.2


class Perdure:
    """`scaling.share`: `workflows/policy/capacity/sharing.py` and `first_come.py`, as the product decides."""

    def __init__(self) -> None:
        self._order = Order()
        self._seen: dict[str, Running] = {}

    def __call__(self, jobs: Sequence[Running], nodes: int, now: float) -> dict[str, int]:
        """Gives each job its nodes."""
        live = {one.job.name: one for one in jobs}
        work = {name: timedelta(seconds=one.done) for name, one in self._seen.items() if name not in live}
        self._seen = live
        at = _BEGIN + timedelta(seconds=now)
        self._order = follow(self._order, [(one.job.name, one.job.asked) for one in jobs], work, nodes, at)
        begun = {turn.name: turn.started_at or at for turn in self._order.turns}
        return share(
            [_sharing_job(one, nodes, now, (begun[one.job.name] - _BEGIN).total_seconds()) for one in jobs], nodes
        )


def _sharing_job(one: Running, nodes: int, now: float, begun: float) -> SharingJob:
    return SharingJob(
        name=one.job.name,
        fewest=one.fewest,
        most=one.most(nodes),
        asked=one.job.asked,
        present=one.nodes,
        throughput=one.throughput,
        age=now - one.job.submitted,
        done=one.done,
        waits=max(begun - one.job.submitted, 0.0),
    )


def static(jobs: Sequence[Running], nodes: int, now: float, *, overtakes: bool = False) -> dict[str, int]:
    """Each job has what it asked for, in the order of submission, from its start to its end."""
    given = {one.job.name: one.nodes for one in jobs}
    left = nodes - sum(given.values())
    for one in jobs:
        if one.nodes:
            continue
        if one.job.asked > left:
            if overtakes:
                continue
            break
        given[one.job.name] = one.job.asked
        left -= one.job.asked
    return given


def overtaking(jobs: Sequence[Running], nodes: int, now: float) -> dict[str, int]:
    """The same, but a job for which there is room overtakes one for which there is none, which may wait forever."""
    return static(jobs, nodes, now, overtakes=True)


class DLRoverRM:
    """DLRover-RM (PVLDB 17(12), arXiv 2304.01468) with the rules of its optimizer: jobs start with what they asked for.
    Every five minutes one whose last addition made it faster by at least a fifth of its share gets eight more workers
    (of a GPU each) of what is free while no job waits, and one whose last addition did not gives it back. Nothing is
    taken from a job for another."""

    def __init__(self, gpus_of_a_node: int) -> None:
        self._added = max(_RM_ADDED // gpus_of_a_node, 1)
        self._looked: dict[str, float] = {}
        self._before: dict[str, int] = {}

    def __call__(self, jobs: Sequence[Running], nodes: int, now: float) -> dict[str, int]:
        """Gives each job its nodes."""
        given = static(jobs, nodes, now)
        left = nodes - sum(given.values()) if all(given.values()) else 0
        for one in jobs:
            name = one.job.name
            if not one.nodes or now - self._looked.setdefault(name, now) < _RM_EVERY or one.nodes not in one.paces:
                continue
            self._looked[name] = now
            before = self._before.get(name)
            gained = before is None or before not in one.paces or self._gain(one, before) >= _RM_LEAST
            if not gained and before is not None and one.nodes > before:
                given[name] = before
                continue
            more = min(self._added, left, one.most(nodes) - one.nodes)
            if gained and more > 0:
                self._before[name] = one.nodes
                given[name] = one.nodes + more
                left -= more
        return given

    @staticmethod
    def _gain(one: Running, before: int) -> float:
        """What the last workers have added, as a share of what those before them do."""
        if one.nodes <= before:
            return 0.0
        return (one.paces[before].step / one.paces[one.nodes].step - 1) / (one.nodes / before - 1)


class Pollux:
    """Pollux (OSDI'21, section 4.2): the allocation with the largest power mean (p = -1) of the jobs' speedups over an
    equal share, where a change counts less the more changes a job has had for its age. A job has at most twice the
    nodes that it ever had, and is taken to scale perfectly until it has had two numbers. The batch is fixed here, so
    its goodput is its throughput. The paper searches by a genetic algorithm; here nodes are added one by one where the
    mean gains most."""

    def __call__(self, jobs: Sequence[Running], nodes: int, now: float) -> dict[str, int]:
        """Gives each job its nodes."""
        fair = max(nodes // max(len(jobs), 1), 1)
        given = {one.job.name: 0 for one in jobs}
        left = nodes
        # A job without nodes makes the mean zero: each has one first, the oldest ones if there are too few.
        for one in jobs:
            if left >= 1:
                given[one.job.name] = 1
                left -= 1
        worth = [(-self._worth(one, 1, fair, nodes), one.job.name, one) for one in jobs if given[one.job.name]]
        heapify(worth)
        while worth and left > 0:
            value, name, one = worth[0]
            if value >= 0:
                heappop(worth)
                continue
            given[name] += 1
            left -= 1
            heapreplace(worth, (-self._worth(one, given[name], fair, nodes), name, one))
        return self._without_vain_changes(jobs, given, nodes, fair, now)

    def _without_vain_changes(
        self, jobs: Sequence[Running], given: dict[str, int], nodes: int, fair: int, now: float
    ) -> dict[str, int]:
        """Leaves jobs as they are where a change, by what it costs, adds nothing, and the others' nodes allow it."""
        left = nodes - sum(given.values())
        for one in jobs:
            chosen, present = given[one.job.name], one.nodes
            if not present or chosen == present or present - chosen > left:
                continue
            age = now - one.job.submitted
            factor = max(age - one.changes * CHANGE_S, 1.0) / (age + CHANGE_S)
            if self._speed(one, chosen) * factor <= self._speed(one, present):
                left -= present - chosen
                given[one.job.name] = present
        return given

    def _worth(self, one: Running, present: int, fair: int, nodes: int) -> float:
        """What one node more adds to the mean."""
        if present + 1 > min(one.most(nodes), max(2 * one.most_had, 1)):
            return 0.0
        usual = self._speed(one, fair)
        return usual / self._speed(one, present) - usual / self._speed(one, present + 1)

    @staticmethod
    def _speed(one: Running, nodes: int) -> float:
        known = one.throughput.speed(nodes)
        if known is not None:
            return known
        had, pace = next(iter(one.paces.items()), (one.job.asked, None))
        return nodes / had / (pace.step if pace is not None else 1.0)
