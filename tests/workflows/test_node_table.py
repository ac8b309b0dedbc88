"""Tests of what a group concludes from the events of its agents and its backend, in any order: values only."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest

from perdure.contract import (
    Adopt,
    Check,
    Checked,
    CopyReceiver,
    DatasetNeeded,
    DatasetParameters,
    DesiredNode,
    GroupDesire,
    Joined,
    LeaseTaken,
    Member,
    NodeCredentials,
    NodeEvent,
    NodeEventKind,
    NodeEvents,
    NodePhase,
    PortsChanged,
    Ready,
    UnsoundSteps,
    World,
)
from perdure.contract.transitions import AnyTransition, NodeChecked, NodeCreateFailed, NodeJoined, NodePending
from perdure.spec.validate import parse_spec
from perdure.workflows import agent_reports, options
from perdure.workflows.backend_reports import begin_watch, take_watch_events
from perdure.workflows.node_desired import differing
from perdure.workflows.node_record import GroupInput, NodeRecord
from perdure.workflows.node_table import NodeTable
from perdure.workflows.policy.checkpoints.copies import copies_token
from tests.workflows.fleet import job_spec

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NODE = NodeCredentials(uid="0a1b2c3d", role="worker", rank=0, incarnation=1, token="t" * 16)
NOT_PULLED = "training: its image cannot be pulled (ErrImagePull: not found)"
PENDING, RUNNING = NodeEventKind.PENDING, NodeEventKind.RUNNING


class Table:
    """A table with one node, and what is said to it."""

    def __init__(self) -> None:
        spec = job_spec("1")
        group = GroupInput(
            job_id=f"job/default/{spec['name']}",
            job_first_run_id="run",
            uid=NODE.uid,
            group=0,
            role="worker",
            spec=parse_spec(spec),
            desire=GroupDesire(version=1, nodes={0: DesiredNode(incarnation=1, token=NODE.token)}),
        )
        self.table = NodeTable(group)
        self.table.put(NodeRecord(node=NODE, since=NOW))
        self._sequence = count(1)

    def event(self, kind: NodeEventKind, reason: str = "", **facts: Any) -> list[NodeRecord]:
        event = NodeEvent(kind=kind, rank=0, incarnation=1, time=NOW, reason=reason, **facts)
        return take_watch_events(self.table, NodeEvents(events=(event,)))

    def joined(self) -> None:
        agent_reports.joined(
            self.table,
            Joined(sender=NODE, sequence=next(self._sequence), time=NOW, agent_started_at=NOW, address="a", host="h"),
        )
        agent_reports.lease_taken(
            self.table, LeaseTaken(sender=NODE, sequence=next(self._sequence), time=NOW, agent_started_at=NOW, epoch=1)
        )

    def continue_as_new(self) -> None:
        self.table = NodeTable(self.table.to_carry())

    def admits(self, dataset: str, *, sender: NodeCredentials = NODE) -> bool:
        needed = DatasetNeeded(
            sender=sender,
            sequence=next(self._sequence),
            time=NOW,
            name=dataset,
            parameters=DatasetParameters(size=1, shard_size=1),
        )
        return self.table.admits_dataset(needed)

    def ready(self) -> None:
        agent_reports.ready(self.table, Ready(sender=NODE, sequence=next(self._sequence), time=NOW, store_ports=(1,)))

    @property
    def shown(self) -> tuple[NodePhase, str]:
        [view] = self.table.views()
        return view.phase, view.reason

    @property
    def told(self) -> list[tuple[type[AnyTransition], str]]:
        return [
            (type(transition), getattr(transition, "detail", ""))
            for transition in self.table.transitions.carried.waiting
        ]


@pytest.mark.parametrize("joins_first", [True, False])
def test_why_a_command_cannot_start_is_told_although_the_agent_has_joined(joins_first: bool) -> None:
    table = Table()
    if joins_first:
        table.joined()
    table.event(PENDING, NOT_PULLED)
    if not joins_first:
        table.joined()
    assert table.shown == (NodePhase.PENDING, NOT_PULLED)
    assert table.told[-1] == (NodePending, NOT_PULLED)
    told = len(table.told)
    table.event(PENDING, NOT_PULLED)
    assert len(table.told) == told, "told once"
    table.event(RUNNING)
    assert table.shown == (NodePhase.JOINED, "")
    assert table.told[-1] == (NodeJoined, "")
    table.ready()
    assert table.shown == (NodePhase.READY, "")


def test_ports_are_those_of_the_newest_report() -> None:
    table = Table()
    table.joined()
    for sequence, ports in ((9, (7, 8)), (8, (5,)), (10, ())):
        agent_reports.ports_changed(
            table.table, PortsChanged(sender=NODE, sequence=sequence, time=NOW, store_ports=ports)
        )
    [view] = table.table.views()
    assert view.store_ports == (7, 8)


def test_each_run_of_checks_is_reported_once() -> None:
    table = Table()
    table.joined()
    checks = (Check(name="memory", value=9.0),)
    for sequence in (9, 9, 10):
        agent_reports.checked(
            table.table, Checked(sender=NODE, sequence=sequence, time=NOW, run=sequence - 8, checks=checks)
        )
    reported = [one for one in table.table.transitions.carried.waiting if isinstance(one, NodeChecked)]
    assert [(one.run, one.checks) for one in reported] == [(1, checks), (2, checks)]


def test_what_a_queue_said_is_late_once_the_agent_has_joined() -> None:
    table = Table()
    table.event(PENDING, "no machine can take it", queued=True)
    table.joined()
    assert table.shown == (NodePhase.JOINED, "")
    table.event(PENDING, "no machine can take it", queued=True)
    assert table.shown == (NodePhase.JOINED, "")


def test_a_node_that_its_backend_has_not_made_is_not_taken_for_one_that_is_gone() -> None:
    table = Table()
    table.event(PENDING, "its namespace's quota is used up", queued=True, absent=True)
    assert table.shown == (NodePhase.PENDING, "its namespace's quota is used up")
    assert not begin_watch(table.table)
    assert table.table.creation_pending(table.table.records[0]), "the next run of the group asks for it"


@pytest.mark.parametrize("kind", [PENDING, NodeEventKind.GONE])
def test_what_can_never_run_is_refused(kind: NodeEventKind) -> None:
    table = Table()
    table.joined()
    assert table.event(kind, "its image's name is invalid", refused=True)
    assert table.shown == (NodePhase.LOST, "its image's name is invalid")
    assert table.told[-1] == (NodeCreateFailed, "its image's name is invalid")


def test_a_node_cannot_start_datasets_without_end() -> None:
    table = Table()
    assert not table.admits("d", sender=NODE.model_copy(update={"token": "guessed"}))
    for number in range(options.DATASETS_PER_GROUP):
        assert table.admits(f"d{number}")
        if number % 10 == 0:
            table.continue_as_new()
    table.continue_as_new()
    assert not table.admits("another")
    assert table.admits("d0"), "one that was terminated begins anew"


class Copies:
    """A table of nodes that keep copies for each other, as their agents report."""

    def __init__(self, nodes: int) -> None:
        spec = job_spec(str(nodes), checkpoint={"watch": "/saves"})
        desired = {rank: DesiredNode(incarnation=1, token=f"secret-{rank}") for rank in range(nodes)}
        self.table = NodeTable(
            GroupInput(
                job_id=f"job/default/{spec['name']}",
                job_first_run_id="run",
                uid=NODE.uid,
                group=0,
                role="worker",
                spec=parse_spec(spec),
                desire=GroupDesire(version=1, nodes=desired),
            )
        )
        self._sequence = count(1)

    def node(self, rank: int, incarnation: int = 1) -> NodeCredentials:
        return NodeCredentials(
            uid=NODE.uid, role="worker", rank=rank, incarnation=incarnation, token=f"secret-{rank}-{incarnation}"
        )

    def join(self, rank: int, incarnation: int = 1, *, port: int = 1, started: datetime = NOW, rack: str = "") -> None:
        node = self.node(rank, incarnation)
        if self.table.current(node) is None:
            self.table.put(NodeRecord(node=node, since=NOW))
        agent_reports.joined(
            self.table,
            Joined(
                sender=node,
                sequence=next(self._sequence),
                time=NOW,
                agent_started_at=started,
                address=f"10.0.0.{rank}",
                copies=CopyReceiver(port=port, folder=f"folder-{rank}-{incarnation}", rack=rack),
            ),
        )

    def lose(self, rank: int) -> None:
        self.table.put(self.table.records[rank].replace(phase=NodePhase.LOST))

    def holder(self, rank: int, incarnation: int = 1) -> tuple[int, int] | None:
        found = self.table.copy_target(self.node(rank, incarnation))
        return None if found is None else (found.rank, found.incarnation)


def test_copies_are_kept_in_another_rack_where_the_agents_know_theirs() -> None:
    copies = Copies(4)
    for rank, rack in enumerate(("a", "a", "b", "b")):
        copies.join(rank, rack=rack)
    assert [copies.holder(rank) for rank in range(4)] == [(2, 1), (3, 1), (0, 1), (1, 1)]


def test_a_replacement_is_told_the_node_that_has_kept_the_copies_also_in_the_next_run_of_the_group() -> None:
    copies = Copies(3)
    copies.join(0)
    assert copies.holder(0) is None, "there is no other node yet"
    for rank in (1, 2):
        copies.join(rank)
    assert [copies.holder(rank) for rank in range(3)] == [(1, 1), (2, 1), (0, 1)]
    copies.table = NodeTable(copies.table.to_carry())
    copies.lose(1)
    copies.join(1, 2)
    assert copies.holder(1, 2) == (2, 1)
    found = copies.table.copy_target(copies.node(1, 2))
    assert found is not None
    assert (found.address, found.port, found.folder) == ("10.0.0.2", 1, "folder-2-1")
    assert found.token == copies_token("secret-2-1", role="worker", rank=1)


def test_another_node_keeps_the_copies_of_one_whose_keeper_is_lost() -> None:
    copies = Copies(3)
    for rank in range(3):
        copies.join(rank)
    assert [copies.holder(rank) for rank in range(3)] == [(1, 1), (2, 1), (0, 1)]
    copies.lose(1)
    assert copies.holder(0) == (2, 1)


def test_an_agent_that_was_started_again_is_told_again() -> None:
    copies = Copies(2)
    for rank in (0, 1):
        copies.join(rank)
    node, other = copies.node(0), copies.node(1)
    desired, of_other = differing(copies.table, node), differing(copies.table, other)
    assert desired is not None
    assert of_other is not None
    assert desired.copies == copies.table.copy_target(node)
    for rank, taken in ((0, desired), (1, of_other)):
        copies.table.put(copies.table.records[rank].replace(acknowledged=taken))
    copies.join(0)
    assert differing(copies.table, node) is None
    copies.join(0, port=2, started=NOW + timedelta(seconds=9))
    assert differing(copies.table, node) == desired
    moved = differing(copies.table, other)
    assert moved is not None
    assert moved.copies is not None
    assert moved.copies.port == 2, "its copies are at another port now"


def test_the_agents_of_an_earlier_release_are_told_nothing() -> None:
    table = Table()
    table.joined()
    assert table.table.copy_target(NODE) is None


def test_a_job_that_adopts_a_group_gets_its_newest_world_also_where_the_job_was_suspended():
    table = Table().table
    world = World(
        generation=3,
        members={0: Member(incarnation=1, group_rank=0, base_rank=0, processes=1)},
        nodes=1,
        processes=1,
        store_address="10.0.0.1",
        store_port=29500,
        store_rank=0,
        unsound=UnsoundSteps(generation=2, after=50, found_at=61),
    )
    table.take_desire(table.desire.replace(version=2, world=world))
    table.adopt(Adopt(ownership_epoch="second"))
    assert table.transitions.carried.world == world.of({})
    table.take_desire(table.desire.replace(version=3, nodes={}, world=None))
    again = NodeTable(table.to_carry())
    again.adopt(Adopt(ownership_epoch="third"))
    assert again.transitions.carried.world == world.of({})
