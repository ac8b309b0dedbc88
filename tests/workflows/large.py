"""Creates large jobs with long histories without running them, for tests of carried state and answers."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from uuid import UUID

from perdure.contract import Considered, Evidence, EvidenceSource, IncidentView, JobPhase, Member, NodePhase, World
from perdure.contract.names import group_index
from perdure.contract.vocabulary import FailureClass
from perdure.workflows.policy.state.job import JobState
from perdure.workflows.policy.state.node import NodeState
from perdure.workflows.policy.state.role import RoleState, TransitionsTaken

TIME = datetime(2026, 1, 1, tzinfo=UTC)
LONG = "ошибка: соединение разорвано соседом по кольцу; "


def token(rank: int) -> str:
    """As random as a real one: it does not compress."""
    return UUID(bytes=hashlib.blake2b(rank.to_bytes(4), digest_size=16).digest()).hex


def large_node(rank: int) -> NodeState:
    return NodeState(
        rank=rank,
        incarnation=1 + rank % 3,
        token=token(rank),
        phase=NodePhase.READY,
        since=TIME + timedelta(milliseconds=rank * 7919 % 100_003),
        host=f"gpu-{rank:05}.rack-{rank // 32}.cluster.example",
        address=f"10.{rank >> 16}.{rank >> 8 & 255}.{rank & 255}",
        avoids=tuple(f"gpu-{rank // 128 + i:05}.rack-{i}.cluster.example" for i in range(4)),
        processes=8,
        store_ports=tuple(30_000 + (rank * 31 + i * 977) % 30_000 for i in range(4)),
        used_ports=tuple(20_000 + (rank * 17 + i * 991) % 10_000 for i in range(2)),
        commanded=1,
        entered=1,
        stepping=1,
        stepped=1,
        sequences=tuple(range(1 + rank % 5)),
    )


def long_incident(number: int, text: str = LONG) -> IncidentView:
    """One whose every text is as long as it may become."""
    at = TIME + timedelta(minutes=number)
    return IncidentView(
        number=number,
        title=f"node {number}: {text * 8}",
        failure=FailureClass.USER_CODE,
        culprit=number,
        started_at=at,
        noticed_at=at,
        decided_at=at,
        stepping_at=at + timedelta(seconds=9),
        evidence=tuple(
            Evidence(time=at, source=EvidenceSource.AGENT, rank=rank, text=f"{number}.{rank}: {text * 24}")
            for rank in range(24)
        ),
        rule='fatal-exit-code/1 "retry.fatal_exit_codes"',
        action=text * 8,
        considered=(Considered(option="restart in place", why_not=text * 8),) * 3,
        generation_before=1,
        generation_after=1,
        log_tail=(text * 60)[:2000],
    )


def large_state(nodes: int, *, incidents: int = 0, name: str = "large") -> JobState:
    """A job that trains with all its nodes."""
    world = World(
        generation=1,
        members={
            rank: Member(incarnation=1 + rank % 3, group_rank=rank, base_rank=rank * 8, processes=8)
            for rank in range(nodes)
        },
        nodes=nodes,
        processes=8 * nodes,
        store_address="10.0.0.0",
        store_port=29_999,
        store_rank=0,
    )
    groups = range(group_index(nodes - 1) + 1)
    return JobState(
        name=name,
        namespace="default",
        uid="0123abcd",
        started_at=TIME,
        incidents=tuple(long_incident(number + 1) for number in range(incidents)),
        incident_count=incidents,
        roles={
            "worker": RoleState(
                role="worker",
                phase=JobPhase.RUNNING,
                nodes_min=nodes,
                nodes_max=nodes,
                nodes={rank: large_node(rank) for rank in range(nodes)},
                generation=1,
                world=world,
                world_decided_at=TIME,
                ownership_epochs={group: token(group) for group in groups},
                taken={group: TransitionsTaken(sequence=9, transitions=99) for group in groups},
            )
        },
    )
