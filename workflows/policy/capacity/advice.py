"""Advises the jobs of a cluster how many nodes to have: applies the rule of `sharing.py` to what a cluster shows.

Jobs whose nodes need the same resources can have each other's nodes, and are a pool. What a job has missed is in no
view, so it is added up here from one view to the next, as is what each pool would have without sharing. A job counts on
the number in the middle of its range, by ratio.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from math import sqrt
from typing import NamedTuple

from pydantic import Field

from perdure.contract import ClusterJob, ClusterSummary, Exchange, Message, NodesSuggested, SharingPolicy
from perdure.workflows.policy.capacity.first_come import Order, follow
from perdure.workflows.policy.capacity.sharing import SharingJob, share
from perdure.workflows.policy.capacity.throughput import Throughput

APART = timedelta(seconds=60)
"""The time between two changes of a pool, except for a job that waits for its first nodes: a change has to be carried
out before its result can be seen, and costs each job a second and a checkpoint."""
AGAIN = timedelta(minutes=2)
"""The time after which advice is given again that a job has not followed."""
_LONGEST_GAP = timedelta(minutes=10)
"""The longest time that counts between two views: longer, no one has looked."""
ELSEWHERE = "a job of another namespace"


class Account(Message):
    """What is known of one role from earlier views."""

    done: float = 0.0
    """Seconds that its work until now would have taken with the nodes that it counts on."""
    seen_at: datetime
    advised: int = 0
    """The number of nodes of the newest advice; 0 before the first."""
    advised_at: datetime | None = None


class SharingState(Message):
    """What the sharing of a cluster remembers."""

    number: int = 0
    """The number of the newest advice."""
    accounts: dict[str, Account] = Field(default={})
    changed_at: dict[str, datetime] = Field(default={})
    """When each pool was changed last."""
    orders: dict[str, Order] = Field(default={})
    """What jobs of each pool would have without sharing."""


class Advice(NamedTuple):
    """A message for a job."""

    namespace: str
    job: str
    message: NodesSuggested


def advise(
    state: SharingState, seen: ClusterSummary, now: datetime
) -> tuple[SharingState, tuple[Advice, ...], datetime | None]:
    """Returns the state, what jobs are to be told, and when to look again without a new view."""
    jobs = {_key(job): job for job in seen.jobs}
    work = {key: timedelta(seconds=account.done) for key, account in state.accounts.items() if key not in jobs}
    accounts = {key: _count(state.accounts.get(key), job, now) for key, job in jobs.items()}
    state = state.replace(accounts=accounts)
    if seen.sharing in (None, SharingPolicy.UNKNOWN):
        return state, (), None
    pools: defaultdict[str, dict[str, ClusterJob]] = defaultdict(dict)
    for key, job in jobs.items():
        if job.pool and job.room is not None:
            pools[job.pool][key] = job
    orders = {pool: _follow(state.orders.get(pool, Order()), members, work, now) for pool, members in pools.items()}
    state = state.replace(orders=orders)
    advice: list[Advice] = []
    looks: list[datetime] = []
    for pool, members in sorted(pools.items()):
        changed_at = state.changed_at.get(pool)
        if changed_at is not None and now < changed_at + APART and not _is_waited_for(members, accounts):
            looks.append(changed_at + APART)
            continue
        given = _shares(members, accounts, orders[pool], seen.sharing, now)
        state, told = _tell(state, members, given, now)
        if told:
            state = state.replace(changed_at=state.changed_at | {pool: now})
        advice += told
    return (
        state.replace(changed_at={pool: at for pool, at in state.changed_at.items() if pool in pools}),
        (tuple(advice)),
        min(looks, default=None),
    )


def _key(job: ClusterJob) -> str:
    return f"{job.uid}/{job.role}"


def _count(account: Account | None, job: ClusterJob, now: datetime) -> Account:
    if account is None:
        return Account(seen_at=now)
    gap = min(max(now - account.seen_at, timedelta()), _LONGEST_GAP).total_seconds()
    speed = _sharing_job(job, account, Order(), now).speed(job.nodes) if job.nodes else 0.0
    return account.replace(done=account.done + gap * speed, seen_at=now)


def _asked(job: ClusterJob) -> int:
    """The nodes that a job counts on."""
    middle = round(sqrt(job.fewest * job.most) / job.unit) * job.unit
    return min(max(middle, job.fewest), job.most)


def _follow(order: Order, members: Mapping[str, ClusterJob], work: Mapping[str, timedelta], now: datetime) -> Order:
    jobs = sorted(members.items(), key=lambda item: (item[1].started_at, item[0]))
    return follow(order, [(key, _asked(job)) for key, job in jobs], work, _total(members), now)


def _sharing_job(job: ClusterJob, account: Account, order: Order, now: datetime) -> SharingJob:
    return SharingJob(
        name=_key(job),
        fewest=job.fewest,
        most=job.most,
        asked=_asked(job),
        unit=job.unit,
        present=job.nodes,
        throughput=Throughput(job.paces, global_batch=job.global_batch),
        priority=job.priority,
        age=max((now - job.started_at).total_seconds(), 0.0),
        done=account.done,
        waits=order.waits(job.started_at, _key(job), now).total_seconds(),
    )


def _is_waited_for(members: Mapping[str, ClusterJob], accounts: Mapping[str, Account]) -> bool:
    """Whether a job that has had no advice yet waits for its first nodes."""
    return any(not job.nodes and accounts[key].advised_at is None for key, job in members.items())


def _total(members: Mapping[str, ClusterJob]) -> int:
    """The nodes of a pool."""
    return sum(job.nodes for job in members.values()) + min(job.room or 0 for job in members.values())


def _shares(
    members: Mapping[str, ClusterJob],
    accounts: Mapping[str, Account],
    order: Order,
    policy: SharingPolicy,
    now: datetime,
) -> dict[str, int]:
    jobs = [_sharing_job(job, accounts[key], order, now) for key, job in members.items()]
    return share(jobs, _total(members), policy)


def _tell(
    state: SharingState, members: Mapping[str, ClusterJob], given: Mapping[str, int], now: datetime
) -> tuple[SharingState, list[Advice]]:
    change = {key: given[key] - job.nodes for key, job in members.items() if given[key]}
    of, to = _exchanges(members, change)
    told: list[Advice] = []
    for key, job in sorted(members.items()):
        nodes, account = given[key], state.accounts[key]
        if not nodes or nodes == job.requested:
            continue
        if account.advised == nodes and account.advised_at is not None and now < account.advised_at + AGAIN:
            continue
        # A cluster that is reset has forgotten its newest numbers, and jobs ignore older ones. It gives less than one
        # advice a second in the long run.
        state = state.replace(
            number=max(state.number + 1, int(now.timestamp())),
            accounts=state.accounts | {key: account.replace(advised=nodes, advised_at=now)},
        )
        message = NodesSuggested(
            uid=job.uid,
            role=job.role,
            nodes=nodes,
            number=state.number,
            free=max(change[key] - sum(one.nodes for one in of[key]), 0),
            of=tuple(of[key]),
            to=tuple(to[key]),
        )
        told.append(Advice(job.namespace, job.job, message))
    return state, told


def _exchanges(
    members: Mapping[str, ClusterJob], change: Mapping[str, int]
) -> tuple[Mapping[str, Sequence[Exchange]], Mapping[str, Sequence[Exchange]]]:
    """Pairs those who gain nodes with those who give some: from whom each job has its nodes, and to whom they go."""
    of: defaultdict[str, list[Exchange]] = defaultdict(list)
    to: defaultdict[str, list[Exchange]] = defaultdict(list)
    left = {key: -number for key, number in sorted(change.items()) if number < 0}
    for gainer, gained in sorted(change.items()):
        missing = gained
        for giver in left if gained > 0 else ():
            nodes = min(missing, left[giver])
            if nodes:
                of[gainer].append(Exchange(job=_name(members[giver], members[gainer]), nodes=nodes))
                to[giver].append(Exchange(job=_name(members[gainer], members[giver]), nodes=nodes))
                left[giver] -= nodes
                missing -= nodes
    return of, to


def _name(job: ClusterJob, told: ClusterJob) -> str:
    """The name of a job as another one is told it."""
    return job.job if job.namespace == told.namespace else ELSEWHERE
