"""Tests of what a group sends to an agent, and how long it waits: an agent may poll late, while its lease holds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from temporalio import workflow
from temporalio.common import RawValue
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.exceptions import ActivityError, TimeoutError, TimeoutType

from perdure.contract import (
    ApplyDesired,
    CheckpointCommitted,
    CheckpointRef,
    Commit,
    DesiredNode,
    GroupDesire,
    HoldRequest,
    Leaving,
    Member,
    NodeCredentials,
    NodeDesired,
    NodeReached,
    World,
)
from perdure.contract.transitions import AnyTransition, NodeCommanded, NodeCommittedCheckpoint, NodeUnresponsive
from perdure.spec.validate import parse_spec
from perdure.workflows import agent_reports, node_desired, options
from perdure.workflows.node_record import GroupInput, NodeRecord
from perdure.workflows.node_table import NodeTable
from tests.workflows.fleet import job_spec

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NODE = NodeCredentials(uid="0123abcd", role="worker", rank=0, incarnation=1, token="token")
TIMING = parse_spec(job_spec("1")).timing
FIRST, LEASE = TIMING.commands.schedule_to_start, TIMING.lease.timeout


def joined(**fields: Any) -> NodeRecord:
    return NodeRecord(node=NODE, since=NOW, joined=True, **fields)


def table_of(record: NodeRecord, **fields: Any) -> NodeTable:
    spec = job_spec("1") | fields
    member = Member(incarnation=1, group_rank=0, base_rank=0, processes=1)
    world = World(
        generation=2,
        members={0: member},
        nodes=1,
        processes=1,
        store_address="127.0.0.1",
        store_port=1,
        store_rank=0,
    )
    desire = GroupDesire(version=1, nodes={0: DesiredNode(incarnation=1, token=NODE.token)}, world=world)
    table = NodeTable(
        GroupInput(
            job_id=f"job/default/{spec['name']}",
            job_first_run_id="run",
            uid=NODE.uid,
            group=0,
            role="worker",
            spec=parse_spec(spec),
            desire=desire,
        )
    )
    table.put(record)
    return table


CONVERTER = pydantic_data_converter.payload_converter


@pytest.fixture(autouse=True)
def converter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workflow, "payload_converter", lambda: CONVERTER)


def as_written(answer: NodeReached) -> RawValue:
    """An agent's answer, as its group gets it."""
    return RawValue(CONVERTER.to_payload(answer))


def timed_out(activity: str, kind: TimeoutType) -> ActivityError:
    """The error with which the server ends an activity."""
    error = ActivityError(
        "ended",
        scheduled_event_id=1,
        started_event_id=0,
        identity="",
        activity_type=activity,
        activity_id="1",
        retry_state=None,
    )
    error.__cause__ = TimeoutError("", type=kind, last_heartbeat_details=[])
    return error


async def _turns() -> None:
    """Lets all others act who can."""
    for _ in range(100):
        await asyncio.sleep(0)


async def _wait_condition(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_ranks_that_wait_at_a_step_do_so_until_they_are_ended():
    table = table_of(joined())
    hold = HoldRequest(number=1, generation=1, resizes=True)
    for desired in (hold, None):
        # The world of generation 2 is sent with the end of generation 1's processes, which live on for a moment.
        table.desire = table.desire.replace(hold=desired)
        sent = node_desired.desired_of(table, table.records[NODE.rank])
        assert (sent.world is not None and sent.world.generation, sent.hold) == (2, desired)


class LateAgent:
    """Stands for the server's queue, in which no agent takes the first commands in time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, table: NodeTable, *, misses: int) -> None:
        self._table = table
        self._misses = misses
        self.waits: list[timedelta] = []
        """The time that each command was to wait."""
        self.told: list[list[type[AnyTransition]]] = []
        """What the group had told the job before each command."""
        monkeypatch.setattr(workflow, "execute_activity", self.execute)
        monkeypatch.setattr(workflow, "wait_condition", _wait_condition)
        monkeypatch.setattr(workflow, "wait", asyncio.wait)
        monkeypatch.setattr(workflow, "now", lambda: NOW)

    async def execute(self, name: str, argument: Any, *, schedule_to_start_timeout: timedelta, **_: Any) -> Any:
        self.waits.append(schedule_to_start_timeout)
        self.told.append([type(transition) for transition in self._table.transitions.carried.waiting])
        if len(self.waits) > self._misses:
            return as_written(NodeReached(accepted=True, version=argument.version, generation=2, entered=0))
        raise timed_out(name, TimeoutType.SCHEDULE_TO_START)


@pytest.mark.parametrize(
    ("lapsed_for", "misses", "waits", "unresponsive"),
    [
        pytest.param(None, 1, [FIRST, LEASE], 0, id="its lease holds and it takes the next one"),
        pytest.param(None, 2, [FIRST, LEASE, options.PATIENT_COMMAND], 1, id="its lease holds and it takes none"),
        pytest.param(FIRST, 1, [FIRST, LEASE], 0, id="its lease has just lapsed, as after an outage of the server"),
        pytest.param(LEASE, 1, [FIRST, options.PATIENT_COMMAND], 1, id="its lease has lapsed long ago"),
    ],
)
def test_a_node_whose_lease_holds_may_take_a_command_late(
    monkeypatch: pytest.MonkeyPatch,
    lapsed_for: timedelta | None,
    misses: int,
    waits: list[timedelta],
    unresponsive: int,
) -> None:
    since = None if lapsed_for is None else NOW - lapsed_for
    table = table_of(NodeRecord(node=NODE, since=NOW, joined=True, unreachable_since=since))
    agent = LateAgent(monkeypatch, table, misses=misses)
    asyncio.run(node_desired.converge(table, NODE))
    assert agent.waits == waits
    assert agent.told[-1].count(NodeUnresponsive) == unresponsive


PATIENT = options.PATIENT_COMMAND
OTHER = NODE.model_copy(update={"rank": 1})


def lost_beside(*, silent_for: timedelta = LEASE, **other: Any) -> NodeTable:
    """A node whose lease was not renewed, and another one, which is served unless told otherwise."""
    table = table_of(joined(silent_since=NOW - silent_for))
    served: dict[str, Any] = {"generation": 2, "leased_since": NOW - timedelta(hours=1)}
    table.put(NodeRecord(node=OTHER, since=NOW, joined=True, **served | other))
    return table


@pytest.mark.parametrize(
    ("table", "waits"),
    [
        pytest.param(lost_beside(), [FIRST, PATIENT], id="its lease was not renewed, and another member is served"),
        pytest.param(
            lost_beside(silent_for=FIRST), [FIRST, LEASE - FIRST, PATIENT], id="it has not been silent for long"
        ),
        pytest.param(
            lost_beside(leased_since=NOW - FIRST),
            [FIRST, LEASE, PATIENT],
            id="both leases ended, as after an outage of the server",
        ),
        pytest.param(
            lost_beside(leased_since=NOW - LEASE),
            [FIRST, LEASE, PATIENT],
            id="both leases were scheduled at once, as after a reset or in a group's next run",
        ),
        pytest.param(lost_beside(generation=1), [FIRST, LEASE, PATIENT], id="no other member takes the world"),
        pytest.param(lost_beside(unreachable_since=NOW), [FIRST, LEASE, PATIENT], id="the other member is away, too"),
        pytest.param(lost_beside(leased_since=None), [FIRST, LEASE, PATIENT], id="the other member has no lease"),
    ],
)
def test_a_node_that_alone_is_silent_is_waited_for_as_long_as_its_lease(
    monkeypatch: pytest.MonkeyPatch, table: NodeTable, waits: list[timedelta]
) -> None:
    agent = LateAgent(monkeypatch, table, misses=len(waits) - 1)
    asyncio.run(node_desired.converge(table, NODE))
    assert agent.waits == waits
    assert agent.told[-1].count(NodeUnresponsive) == 1


def test_a_node_whose_silence_shows_while_it_is_waited_for_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = lost_beside()
    silent = table.records[0]
    table.put(silent.replace(silent_since=None))
    agent = LateAgent(monkeypatch, table, misses=1)

    async def execute(name: str, argument: Any, *, schedule_to_start_timeout: timedelta, **options: Any) -> Any:
        if schedule_to_start_timeout == LEASE:
            agent.waits.append(LEASE)
            table.put(table.records[0].replace(silent_since=silent.silent_since))
            await _turns()
            raise AssertionError("it is waited for although its silence shows")
        return await agent.execute(name, argument, schedule_to_start_timeout=schedule_to_start_timeout, **options)

    monkeypatch.setattr(workflow, "execute_activity", execute)
    asyncio.run(node_desired.converge(table, NODE))
    assert agent.waits == [FIRST, LEASE, PATIENT]
    assert agent.told[-1].count(NodeUnresponsive) == 1


class Agent:
    """Stands for the server's queue and an agent that takes what it is sent; `then` runs before each answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, knows: int = 0) -> None:
        self.knows = knows
        """The newest version that it has taken."""
        self.committed: CheckpointRef | None = None
        """The checkpoint that it has committed last."""
        self.sent: list[ApplyDesired] = []
        self.then: Callable[[], Awaitable[None]] | None = None
        monkeypatch.setattr(workflow, "execute_activity", self._execute)
        monkeypatch.setattr(workflow, "wait_condition", _wait_condition)
        monkeypatch.setattr(workflow, "wait", asyncio.wait)
        monkeypatch.setattr(workflow, "now", lambda: NOW)

    async def _execute(self, name: str, argument: ApplyDesired, **_: Any) -> RawValue:
        self.sent.append(argument)
        if self.then is not None:
            then, self.then = self.then, None
            await then()
        accepted = argument.version >= self.knows
        self.knows = max(self.knows, argument.version)
        reached = NodeReached(accepted=accepted, version=self.knows, generation=2, entered=0, committed=self.committed)
        return as_written(reached)


def test_an_agent_that_has_taken_all_is_sent_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    table, agent = table_of(joined()), Agent(monkeypatch)
    asyncio.run(node_desired.converge(table, NODE))
    assert node_desired.differing(table, NODE) is None
    asyncio.run(node_desired.converge(table, NODE))
    assert [command.version for command in agent.sent] == [1]


def test_an_agent_that_knows_an_earlier_groups_versions_is_sent_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    table, agent = table_of(joined()), Agent(monkeypatch, knows=57)
    asyncio.run(node_desired.converge(table, NODE))
    assert [command.version for command in agent.sent] == [1, 58]
    assert table.records[0].version == 58
    assert [type(one) for one in table.transitions.carried.waiting] == [NodeCommanded]


def test_an_agent_that_was_started_again_meanwhile_is_sent_all_of_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    table, agent = table_of(joined(agent_started_at=NOW)), Agent(monkeypatch)

    async def start_again() -> None:
        table.put(table.records[0].replace(agent_started_at=NOW + timedelta(seconds=1)))

    agent.then = start_again
    asyncio.run(node_desired.converge(table, NODE))
    assert [command.version for command in agent.sent] == [1, 2]
    assert agent.sent[0].desired == agent.sent[1].desired


def test_a_newer_world_does_not_wait_for_the_answer_to_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    table, agent = table_of(joined()), Agent(monkeypatch)
    world = table.desire.world
    assert world is not None

    async def desire_newer_and_never_answer() -> None:
        newer = world.model_copy(update={"generation": 3})
        table.take_desire(table.desire.model_copy(update={"version": 2, "world": newer}))
        await asyncio.Event().wait()

    agent.then = desire_newer_and_never_answer
    asyncio.run(node_desired.converge(table, NODE))
    generations = [command.desired.world.generation for command in agent.sent if command.desired.world is not None]
    assert generations == [2, 3]


def test_a_node_that_steps_is_not_asked_whether_it_has_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    table, agent = table_of(joined()), Agent(monkeypatch)
    asyncio.run(node_desired.converge(table, NODE))
    table.take_desire(table.desire.model_copy(update={"version": 2, "inquiry": 1}))
    asyncio.run(node_desired.converge(table, NODE))
    table.put(table.records[0].replace(stepping=2))
    table.take_desire(table.desire.model_copy(update={"version": 3, "inquiry": 2}))
    assert node_desired.differing(table, NODE) is None
    assert [command.desired.inquiry for command in agent.sent] == [0, 1]


def test_a_node_that_is_being_deleted_is_released_when_it_waits_for_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, agent = table_of(joined()), Agent(monkeypatch)
    table.retiring[NODE.key] = table.records.pop(0)
    assert node_desired.differing(table, NODE) is None
    agent_reports.leaving(table, Leaving(sender=NODE, sequence=1, time=NOW, generation=2, reason="deleted"))
    asyncio.run(node_desired.converge(table, NODE))
    assert [command.desired.released for command in agent.sent] == [True]
    assert not table.transitions.carried.waiting, "the job itself ends it"


@pytest.mark.parametrize(("backend", "stopped"), [("local", []), ("joined", [True]), ("ray", [True])])
def test_an_agent_receives_that_its_node_is_to_end_where_the_backend_may_not_reach_it(
    monkeypatch: pytest.MonkeyPatch, backend: str, stopped: list[bool]
) -> None:
    table, agent = table_of(joined(), backend=backend), Agent(monkeypatch)
    desire(table, nodes={}, wind_down=True, reason="job ends: cancelled by ana")
    table.retiring[NODE.key] = table.records.pop(0)
    asyncio.run(node_desired.converge(table, NODE))
    assert ["cancelled by ana" in str(command.desired.stop) for command in agent.sent] == stopped
    assert node_desired.differing(table, NODE) is None, "it is sent once"


COMMIT = Commit(checkpoint=CheckpointRef(step=7, run="run", generation=2), rank=NODE.rank)


def desire(table: NodeTable, **fields: Any) -> None:
    """The job desires this, and all else as before."""
    table.take_desire(table.desire.model_copy(update={"version": table.desire.version + 1, **fields}))


def report_commit(table: NodeTable, *, problem: str = "") -> None:
    agent_reports.checkpoint_committed(
        table,
        CheckpointCommitted(
            sender=NODE,
            sequence=table.records[0].sequences.get("checkpoint_committed", 0) + 1,
            time=NOW,
            checkpoint=COMMIT.checkpoint,
            problem=problem,
        ),
    )


def commits_told(table: NodeTable) -> list[str]:
    """The problems of a commit that the job learns, each empty one a success."""
    told = table.transitions.carried.waiting
    return [one.problem for one in told if isinstance(one, NodeCommittedCheckpoint)]


def test_an_agent_that_has_committed_is_sent_nothing_once_no_commit_is_desired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, agent = table_of(joined()), Agent(monkeypatch)
    desire(table, commit=COMMIT)
    asyncio.run(node_desired.converge(table, NODE))
    report_commit(table, problem="the storage is away")
    report_commit(table)
    assert commits_told(table) == ["the storage is away", ""]
    assert node_desired.differing(table, NODE) is None
    desire(table, commit=None)
    assert node_desired.differing(table, NODE) is None
    assert [command.desired.commit for command in agent.sent] == [COMMIT]


def test_a_commit_whose_report_was_lost_with_a_group_is_learned_from_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, agent = table_of(joined()), Agent(monkeypatch)
    agent.committed = COMMIT.checkpoint
    desire(table, commit=COMMIT)
    asyncio.run(node_desired.converge(table, NODE))
    assert commits_told(table) == [""]
    report_commit(table)
    desire(table, inquiry=1)
    asyncio.run(node_desired.converge(table, NODE))
    assert len(agent.sent) == 2
    assert commits_told(table) == [""], "the job is told once"


def test_a_commit_that_another_node_is_to_carry_out_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    table, agent = table_of(joined()), Agent(monkeypatch)
    desire(table, commit=COMMIT)
    asyncio.run(node_desired.converge(table, NODE))
    report_commit(table, problem="the storage is away")
    desire(table, commit=COMMIT.model_copy(update={"rank": 1}))
    asyncio.run(node_desired.converge(table, NODE))
    assert [command.desired.commit for command in agent.sent] == [COMMIT, None]


def test_an_agent_that_was_started_again_is_sent_its_commit_again(monkeypatch: pytest.MonkeyPatch) -> None:
    table, agent = table_of(joined()), Agent(monkeypatch)
    desire(table, commit=COMMIT, checkpoint_request=1)
    asyncio.run(node_desired.converge(table, NODE))
    table.put(table.records[0].replace(acknowledged=NodeDesired()))
    asyncio.run(node_desired.converge(table, NODE))
    assert [(command.desired.commit, command.desired.checkpoint_request) for command in agent.sent] == [(COMMIT, 1)] * 2


@pytest.mark.parametrize(("group_rank", "request_sent"), [(0, 3), (1, 0)])
def test_only_the_node_of_rank_0_is_to_make_a_requested_checkpoint(
    monkeypatch: pytest.MonkeyPatch, group_rank: int, request_sent: int
) -> None:
    table, agent = table_of(joined()), Agent(monkeypatch)
    world = table.desire.world
    assert world is not None
    member = world.members[0].model_copy(update={"group_rank": group_rank})
    desire(table, world=world.of({0: member}), checkpoint_request=3)
    asyncio.run(node_desired.converge(table, NODE))
    desire(table, checkpoint_request=0)
    assert node_desired.differing(table, NODE) is None, "a request that is answered need not be taken back"
    assert [command.desired.checkpoint_request for command in agent.sent] == [request_sent]
