"""Brings machines and jobs together to what users and the sharing of a cluster see."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from hashlib import sha256

from perdure.activities.cluster.room import fits_smaller
from perdure.activities.nodes.machines import Amounts, Machines, MachineSeen, Owner, Use
from perdure.contract import (
    ClusterJob,
    ClusterRef,
    ClusterSummary,
    ClusterView,
    Holding,
    Machine,
    MachineShape,
    NodeView,
    SharingPolicy,
)
from perdure.contract.base import shorten
from perdure.workflows.policy.capacity.throughput import Throughput

MOST_MACHINES = 200
"""Machines with details: a view is a heartbeat every few seconds, which the server writes. Others are in the sums."""
MOST_JOBS = 200
_MOST_HOLDINGS = 20
_LARGEST = 500_000
"""Bytes of a view: the server refuses heartbeats of 2 MB. Users and machines that join choose texts in it."""
_LONGEST_NAME = 253
"""Characters of a machine's name, as DNS and Kubernetes have them."""
_LONGEST_POOL = 300
_PLAIN = ("cpu", "memory", "pods", "ephemeral-storage")
"""Resources that pods of the system use on all machines."""


def joined_machines(nodes: Iterable[tuple[ClusterJob, NodeView]]) -> Machines:
    """The machines of a backend that sees none: those on which its jobs say that their nodes are."""
    found = Machines()
    for job, node in nodes:
        if not node.host:
            continue
        found.machines.setdefault(node.host, MachineSeen(capacity={}))
        key = f"{job.uid}/{job.role}/{node.rank}/{node.incarnation}"
        found.put(key, Use(node.host, {}, Owner(job.uid, job.role)))
    return found


def with_machines(jobs: Sequence[ClusterJob], machines: Machines) -> tuple[ClusterJob, ...]:
    """Returns the jobs with the nodes that they have on machines, and what more of them would bring."""
    held: Counter[Owner] = Counter()
    examples: dict[Owner, Use] = {}
    waits: defaultdict[Owner, list[Use]] = defaultdict(list)
    for use in machines.uses.values():
        if use.owner is None:
            continue
        examples[use.owner] = use
        if use.machine:
            held[use.owner] += 1
        else:
            waits[use.owner].append(use)
    rooms: dict[tuple[object, ...], int] = {}
    largest = max((job.most for job in jobs), default=0) * 2
    found: list[ClusterJob] = []
    for job in jobs:
        owner = Owner(job.uid, job.role)
        example, waiting = examples.get(owner), waits[owner]
        room, pool = None, ""
        if example is not None:
            kind = _kind(example)
            pool = _pool(example)
            if kind not in rooms:
                rooms[kind] = machines.room(example, at_most=max(largest, 1)) if example.requests else -1
            room = rooms[kind] if rooms[kind] >= 0 else None
        here = job.replace(
            nodes=held[owner],
            waiting=len(waiting),
            waits_for=shorten(next((use.reason for use in waiting if use.reason), "")),
            room=room,
            fits_smaller=fits_smaller(job, waiting, machines),
            pool=pool,
        )
        found.append(here.replace(gain=gain_of(here)))
    return tuple(found)


def _pool(use: Use) -> str:
    pool = "; ".join(f"{key} {value:g}" for key, value in sorted(use.requests.items()))
    pool += "".join(f"; {label}={value}" for label, value in use.selector)
    # A job may have any number of selectors, and its pool is in each message.
    return pool if len(pool) <= _LONGEST_POOL else f"{pool[:_LONGEST_POOL]}… {sha256(pool.encode()).hexdigest()[:16]}"


def gain_of(job: ClusterJob) -> float | None:
    """Returns how much faster another unit of nodes would make a job, by its own measurements."""
    more = job.nodes + job.unit
    if not job.nodes or more > job.most:
        return None
    known = Throughput(job.paces, global_batch=job.global_batch)
    before, after = known.speed(job.nodes), known.speed(more)
    return None if not before or after is None else after / before - 1


def view_of(
    ref: ClusterRef,
    machines: Machines,
    jobs: Sequence[ClusterJob],
    seen_at: datetime,
    *,
    sharing: SharingPolicy | None = None,
    problem: str = "",
) -> ClusterView:
    """Returns what fits of a cluster. `jobs` are those of `with_machines`."""
    names = {Owner(job.uid, job.role): job for job in jobs}
    # Machines with a problem come first, then those on which jobs have nodes.
    owned = {use.machine for use in machines.uses.values() if use.owner in names and use.machine in machines.machines}

    def interest(name: str) -> tuple[bool, bool, str]:
        return not machines.machines[name].problem, name not in owned, name

    chosen = sorted(machines.machines, key=interest)[:MOST_MACHINES]
    waiting = sum(use.owner not in names for use in machines.waiting)
    shown = sorted(jobs, key=lambda job: (not job.waiting, not job.shares, job.namespace, job.job))[:MOST_JOBS]
    view = ClusterView(
        backend=ref.backend,
        seen_at=seen_at,
        machines=tuple(_machine(machines, name, names) for name in chosen),
        machines_total=len(machines.machines),
        shapes=_shapes(machines),
        jobs=tuple(shown),
        jobs_total=len(jobs),
        pods_waiting=waiting,
        events=machines.events,
        sharing=sharing,
        problem=problem or machines.problem,
    )
    while len(view.model_dump_json()) > _LARGEST and len(view.machines) + len(view.jobs) > 1:
        view = view.replace(
            machines=view.machines[: len(view.machines) // 2],
            jobs=view.jobs[: -(-len(view.jobs) // 2)],
            shapes=view.shapes[: -(-len(view.shapes) // 2)],
        )
    return view


def summary_of(view: ClusterView, jobs: Sequence[ClusterJob]) -> ClusterSummary:
    """Returns what the workflow of the cluster is told."""
    return ClusterSummary(
        seen_at=view.seen_at,
        machines=view.machines_total,
        unusable=sum(shape.unusable for shape in view.shapes),
        jobs=tuple(job for job in jobs if job.shares)[:MOST_JOBS],
        sharing=view.sharing,
    )


def _kind(use: Use) -> tuple[object, ...]:
    return tuple(sorted(use.requests.items())), use.tolerates, use.selector


def _machine(machines: Machines, name: str, jobs: dict[Owner, ClusterJob]) -> Machine:
    seen = machines.machines[name]
    held: Counter[Owner] = Counter()
    others = 0
    for use in machines.on(name):
        if use.owner is not None and use.owner in jobs:
            held[use.owner] += 1
        elif use.requests.keys() - {"pods"}:
            others += 1
    holdings = [
        Holding(namespace=jobs[owner].namespace, job=jobs[owner].job, role=owner.role, nodes=number)
        for owner, number in held.items()
    ]
    holdings.sort(key=lambda one: (one.namespace, one.job, one.role))
    return Machine(
        name=name[:_LONGEST_NAME],
        capacity=_rounded(seen.capacity),
        free=_rounded(machines.free(name)),
        taints=seen.taints,
        problem=seen.problem,
        held=tuple(holdings)[:_MOST_HOLDINGS],
        others=others,
    )


def _rounded(amounts: Amounts) -> dict[str, float]:
    """Quantities without what sums of decimal fractions leave."""
    return {what: round(number, 3) for what, number in amounts.items() if what not in ("pods", "ephemeral-storage")}


def _shapes(machines: Machines) -> tuple[MachineShape, ...]:
    sums: dict[tuple[object, ...], MachineShape] = {}
    for name, seen in machines.machines.items():
        capacity = _rounded(seen.capacity)
        key = (tuple(sorted(capacity.items())), seen.taints)
        known = sums.get(key) or MachineShape(machines=0, capacity=capacity, taints=seen.taints)
        sums[key] = known.replace(
            machines=known.machines + 1,
            unusable=known.unusable + bool(seen.problem),
            free=known.free + (not seen.problem and _is_free(machines, name)),
        )
    return tuple(sorted(sums.values(), key=lambda shape: -shape.machines))[:50]


def _is_free(machines: Machines, name: str) -> bool:
    """Whether nothing on it requests what the system's own pods do not."""
    return all(use.owner is None and use.requests.keys() <= {*_PLAIN} for use in machines.on(name))
