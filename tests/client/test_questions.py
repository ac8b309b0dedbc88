"""Tests of questions to the agents of nodes: the workflow that hands them on is real, the agent is played."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import get_type_hints
from uuid import uuid4

import pytest
from pydantic import TypeAdapter, ValidationError
from temporalio import activity
from temporalio.client import Client as TemporalClient
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from perdure.base.errors import LogsUnavailable
from perdure.client.checks import check_nodes
from perdure.client.connection import Connection, Endpoint
from perdure.client.logs import ask_agent
from perdure.client.nodes import RunningNode
from perdure.client.questions import ask_node
from perdure.client.stacks import read_stacks
from perdure.contract import (
    Check,
    CheckNode,
    LogChunk,
    LogPosition,
    NodeChecks,
    NodeId,
    NodeStacks,
    NodeView,
    RankPosition,
    ReadLog,
    ReadStacks,
)
from perdure.contract.names import node_task_queue
from perdure.workflows import options
from perdure.workflows.ask_node import AskNode

JOB = "job/default/asked"
CHUNK = LogChunk(text="Größe\n", position=LogPosition(file=7, offset=9), at_end=False)


class PlayedAgent:
    """Answers questions of all kinds, or refuses them."""

    def __init__(self) -> None:
        self.asked: list[ReadLog | ReadStacks | CheckNode] = []
        self.rooms = [500.0]
        self.refusal = ""

    @activity.defn(name="read_log")
    async def read_log(self, request: ReadLog) -> LogChunk:
        self._take(request)
        return CHUNK

    @activity.defn(name="read_stacks")
    async def read_stacks(self, request: ReadStacks) -> NodeStacks:
        self._take(request)
        return NodeStacks(node=request.rank, ranks=(RankPosition(rank=3, pid=42),))

    @activity.defn(name="check_node")
    async def check_node(self, request: CheckNode) -> NodeChecks:
        self._take(request)
        room = self.rooms.pop(0) if len(self.rooms) > 1 else self.rooms[0]
        return NodeChecks(node=request.rank, checks=(Check(name="room", value=room, unit="MB"),))

    def _take(self, request: ReadLog | ReadStacks | CheckNode) -> None:
        self.asked.append(request)
        if self.refusal:
            raise ApplicationError(self.refusal, non_retryable=True)


@pytest.fixture
def node() -> NodeId:
    return NodeId(uid=uuid4().hex[:8], role="worker", rank=2, incarnation=1)


@pytest.fixture
async def connection(temporal_client: TemporalClient) -> AsyncIterator[Connection]:
    """A connection to a control plane whose worker serves questions."""
    queue = f"asked-{uuid4().hex[:8]}"
    endpoint = Endpoint(address="", task_queue=queue)
    runner = UnsandboxedWorkflowRunner()
    async with Worker(temporal_client, task_queue=queue, workflows=[AskNode], workflow_runner=runner):
        yield Connection(temporal=temporal_client, endpoint=endpoint)


@pytest.fixture
async def agent(temporal_client: TemporalClient, node: NodeId) -> AsyncIterator[PlayedAgent]:
    played = PlayedAgent()
    activities = [played.read_log, played.read_stacks, played.check_node]
    async with Worker(temporal_client, task_queue=node_task_queue(node), activities=activities):
        yield played


async def test_each_question_is_answered_by_its_own_activity(
    connection: Connection, agent: PlayedAgent, node: NodeId
) -> None:
    request = ReadLog(**dict(node), position=LogPosition(file=7, offset=0), lines=3)
    assert await ask_node(connection, JOB, request, LogChunk) == CHUNK
    assert await ask_agent(connection, JOB, request) == CHUNK
    [stacks] = await read_stacks(connection, JOB, [node])
    assert stacks == NodeStacks(node=2, ranks=(RankPosition(rank=3, pid=42),))
    assert agent.asked == [request, request, ReadStacks(**dict(node))]


async def test_an_agent_that_refuses_says_why(connection: Connection, agent: PlayedAgent, node: NodeId) -> None:
    agent.refusal = "the launcher of the node has not answered within 6 s"
    assert await read_stacks(connection, JOB, [node]) == (NodeStacks(node=2, problem=agent.refusal),)
    with pytest.raises(LogsUnavailable, match="the agent of node 2 does not answer"):
        await ask_agent(connection, JOB, ReadLog(**dict(node)))


async def test_a_node_without_an_agent_is_named_beside_those_that_answer(
    connection: Connection, agent: PlayedAgent, node: NodeId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "ANSWER_PATIENCE", timedelta(seconds=1))
    lost = node.model_copy(update={"rank": 5})
    answers = await read_stacks(connection, JOB, [lost, node])
    assert [answer.node for answer in answers] == [5, 2]
    assert answers[0].problem == "its agent does not answer: the node may be gone, or just starting"
    assert not answers[1].problem
    assert agent.asked == [ReadStacks(**dict(node))]


async def checked(connection: Connection, *nodes: NodeId) -> list[str]:
    """The problems that are found, in the order of the nodes."""
    running = [RunningNode(node, NodeView(rank=node.rank, incarnation=1, since=datetime.now(UTC))) for node in nodes]
    found = await check_nodes(connection, JOB, running, full=False)
    assert [one.node for one in found] == [node.rank for node in nodes]
    return [check.problem for one in found for check in one.checks]


async def test_a_check_that_fails_is_made_a_second_time_and_passes_if_that_does(
    connection: Connection, agent: PlayedAgent, node: NodeId
) -> None:
    agent.rooms = [10.0, 200.0]
    assert await checked(connection, node) == [""]
    assert len(agent.asked) == 2
    agent.rooms = [10.0, 20.0]
    assert await checked(connection, node) == ["20 MB is less than 64 MB: the log of a node takes so many MB"]


async def test_a_node_whose_agent_does_not_answer_has_failed(
    connection: Connection, agent: PlayedAgent, node: NodeId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "ANSWER_PATIENCE", timedelta(seconds=1))
    monkeypatch.setattr(CheckNode, "takes", timedelta())
    problems = await checked(connection, node.model_copy(update={"rank": 5}), node)
    assert problems == ["its agent does not answer: the node may be gone, or just starting", ""]


@pytest.mark.parametrize("name", ["apply_desired", "hold_lease", ""])
def test_what_is_no_question_is_handed_to_no_agent(node: NodeId, name: str) -> None:
    question = TypeAdapter[ReadLog | ReadStacks | CheckNode](get_type_hints(AskNode.run)["question"])
    with pytest.raises(ValidationError):
        question.validate_python({**dict(node), "activity": name})
