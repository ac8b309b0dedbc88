"""Shares the nodes of a cluster among elastic jobs: each node goes where it adds most.

What a node adds is the time that a job saves by it for the same work, in times of what it takes with the nodes that it
asked for, by its own measurements. So the first nodes of each job add most, and those beyond what scales add nothing.
It counts more for a job of a higher priority. A job that waits gets the nodes that others gain least from.

A job that has got less than it would have without sharing (`first_come.py`) has what it asked for before others have
more than their fewest. So hardly a job takes much longer than without sharing, whatever comes after it.

No job has fewer than its fewest nodes: a job that trains keeps them, and one that waits starts once they are there. A
node that a job has is worth more to it than one that it has not, as each change costs time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from perdure.contract import SharingPolicy
from perdure.workflows.policy.capacity.throughput import Throughput

_HELD = 1.6
"""What a node that a job has is worth, in times of one that it has not."""
_LEAST_GAIN = 0.2
"""Nodes that add less speed, as a share of what the nodes before them do, stay free."""
_LEAST_CHANGE = 0.25
"""Changes by no more than this share of a job's nodes are not made, as each costs time, unless a job is late."""
_FAIRNESS = 4.0
"""The power with which a job counts for having got less than it asked for, where that is all that counts."""
_GUESSED = 0.85
"""The power of the number of nodes with which the speed is taken to grow while too little is measured."""
_AT_FIRST = 60.0
"""Seconds after which a job counts as one that waits."""
_LATE = 1.0
"""Jobs that take more times as long as without sharing come first. Of 1.0 to 1.2 the smallest has kept the slowest jobs
fastest on traces of six seeds (`make bench-scaling`), and cost the mean least."""


@dataclass(frozen=True)
class SharingJob:
    """An elastic job, as the decision sees it."""

    name: str
    fewest: int
    most: int
    asked: int
    """The nodes that its owner counts on."""
    unit: int = 1
    present: int = 0
    """Nodes that it has; 0 while it waits for its first ones."""
    throughput: Throughput | None = None
    """What it has measured."""
    priority: float = 1.0
    age: float = 0.0
    """Seconds since it was submitted."""
    done: float = 0.0
    """Seconds that its work until now would have taken with `asked` nodes from the start."""
    waits: float = 0.0
    """Seconds until now for which it would have waited for them without sharing."""

    def speed(self, nodes: int) -> float:
        """Returns its speed in times of that with `asked` nodes."""
        measured = self.throughput
        speed, usual = (None, None) if measured is None else (measured.speed(nodes), measured.speed(self.asked))
        return (nodes / self.asked) ** _GUESSED if speed is None or not usual else speed / usual

    @property
    def missed(self) -> float:
        """How many times as long it has taken as with `asked` nodes from the start."""
        return max((self.age + _AT_FIRST) / (self.done + _AT_FIRST), 1.0)

    @property
    def late(self) -> float:
        """How many times as long it has taken as without sharing. One of a low priority may take longer."""
        return min(self.priority, 1.0) * (self.age + _AT_FIRST) / (self.waits + self.done + _AT_FIRST)


def share(jobs: Sequence[SharingJob], nodes: int, policy: SharingPolicy = SharingPolicy.THROUGHPUT) -> dict[str, int]:
    """Returns the number of nodes of each job, 0 for those that wait on.

    Args:
        jobs: All jobs of the cluster that take part.
        nodes: The nodes that they have and those that are free.
        policy: What they are shared for.
    """
    given = {job.name: job.fewest if job.present else 0 for job in jobs}
    left = nodes - sum(given.values())
    if policy is not SharingPolicy.PRIORITY:
        left = _help_late([job for job in jobs if job.fewest <= nodes], given, left)
    waiting = (job for job in jobs if not given[job.name] and job.fewest <= nodes)
    for job in sorted(waiting, key=lambda job: (-_rank(job, policy), -job.priority * job.missed, job.name)):
        if job.fewest > left:
            # Those that count less do not overtake it: it would wait forever.
            break
        given[job.name] = job.fewest
        left -= job.fewest
    worth = [_entry(job, given[job.name], policy) for job in jobs if given[job.name]]
    heapify(worth)
    while worth and left > 0:
        _, value, name, job = worth[0]
        if not value or job.unit > left:
            heappop(worth)
            continue
        given[name] += job.unit
        left -= job.unit
        heapreplace(worth, _entry(job, given[name], policy))
    _leave_small_changes(jobs, given, left)
    return given


def _help_late(jobs: Sequence[SharingJob], given: dict[str, int], left: int) -> int:
    """Gives jobs that are late what they asked for, and returns the nodes that are left."""
    for job in sorted((job for job in jobs if job.late > _LATE), key=lambda job: (-job.late, job.name)):
        present = given[job.name]
        number = present or job.fewest
        if number - present > left:
            # Those that are less late do not overtake it: it would wait forever.
            break
        while number + job.unit <= min(job.asked, present + left) and job.speed(number) < 1.0:
            number += job.unit
        given[job.name] = number
        left -= number - present
    return left


def _leave_small_changes(jobs: Sequence[SharingJob], given: dict[str, int], left: int) -> None:
    """Leaves jobs with the nodes that they have where others hardly differ in number, as far as there are nodes."""
    small = [
        job
        for job in jobs
        if 0 < abs(given[job.name] - job.present) <= _LEAST_CHANGE * job.present
        and not (job.late > _LATE and job.present < min(job.asked, given[job.name]))
    ]
    for job in sorted(small, key=lambda job: (job.present - given[job.name], job.name)):
        more = job.present - given[job.name]
        if more <= left:
            given[job.name] = job.present
            left -= more


def _entry(job: SharingJob, nodes: int, policy: SharingPolicy) -> tuple[float, float, str, SharingJob]:
    """The job in a heap whose first entry is the one to which another unit is worth most."""
    return -_rank(job, policy), -_worth(job, nodes, policy), job.name, job


def _worth(job: SharingJob, nodes: int, policy: SharingPolicy) -> float:
    """What another unit is worth, for each of its nodes; 0 where the job takes none."""
    more = nodes + job.unit
    if more > job.most:
        return 0.0
    before, after = job.speed(nodes), job.speed(more)
    if after / before - 1 < _LEAST_GAIN * job.unit / nodes:
        return 0.0
    held = _HELD if more <= job.present else 1.0
    return held * _weight(job, policy) * (1 / before - 1 / after) / job.unit


def _rank(job: SharingJob, policy: SharingPolicy) -> float:
    """Jobs of a higher rank come first, whatever the others miss."""
    return job.priority if policy is SharingPolicy.PRIORITY else 0.0


def _weight(job: SharingJob, policy: SharingPolicy) -> float:
    match policy:
        case SharingPolicy.THROUGHPUT | SharingPolicy.UNKNOWN:
            return job.priority
        case SharingPolicy.PRIORITY:
            return 1.0
        case SharingPolicy.FAIR:
            return job.missed**_FAIRNESS
