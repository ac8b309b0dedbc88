"""Tests of questions to the agents of nodes: the workflow that hands them on is real, the agent is played."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import get_type_hints
from uuid import uuid4

import pytest
from pydantic import TypeAdapter, ValidationError
from temporalio import activity
from temporalio.client import Client as TemporalClient
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from perdure.base.errors import LogsUnavailable
from perdure.client.connection import Connection, Endpoint
from perdure.client.logs import ask_agent
from perdure.client.questions import ask_node
from perdure.client.stacks import read_stacks
from perdure.contract import LogChunk, LogPosition, NodeId, NodeStacks, RankPosition, ReadLog, ReadStacks
from perdure.contract.names import node_task_queue
from perdure.workflows import options
from perdure.workflows.ask_node import AskNode

JOB = "job/default/asked"
CHUNK = LogChunk(text="Größe\n", position=LogPosition(file=7, offset=9), at_end=False)


class PlayedAgent:
    """Answers questions of both kinds, or refuses them."""

    def __init__(self) -> None:
        self.asked: list[ReadLog | ReadStacks] = []
        self.refusal = ""

    @activity.defn(name="read_log")
    async def read_log(self, request: ReadLog) -> LogChunk:
        self._take(request)
        return CHUNK

    @activity.defn(name="read_stacks")
    async def read_stacks(self, request: ReadStacks) -> NodeStacks:
        self._take(request)
        return NodeStacks(node=request.rank, ranks=(RankPosition(rank=3, pid=42),))

    def _take(self, request: ReadLog | ReadStacks) -> None:
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
    activities = [played.read_log, played.read_stacks]
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


@pytest.mark.parametrize("name", ["apply_desired", "hold_lease", ""])
def test_what_is_no_question_is_handed_to_no_agent(node: NodeId, name: str) -> None:
    question = TypeAdapter[ReadLog | ReadStacks](get_type_hints(AskNode.run)["question"])
    with pytest.raises(ValidationError):
        question.validate_python({**dict(node), "activity": name})
