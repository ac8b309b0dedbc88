"""Tests of creating many nodes in one activity: it reports which succeeded; the others are requested again one by
one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from perdure.activities.nodes.activities import NodeActivities
from perdure.activities.nodes.backend import NodeNotYet, NodeRefused
from perdure.contract import (
    CreatedNode,
    NodeEvent,
    NodeEvents,
    NodeRef,
    NodeRequest,
    NodesRequest,
    RequestedNode,
    WatchRequest,
)
from tests.activities.local_nodes import LocalJob


class Moody:
    """A backend with another answer for each rank."""

    name = "local"

    async def create(self, request: NodeRequest) -> CreatedNode:
        match request.node.rank:
            case 0 | 4:
                return CreatedNode(name=request.name)
            case 1:
                raise NodeRefused("the image's name is invalid")
            case 2:
                raise NodeNotYet("the base is not admitted")
            case _:
                raise ConnectionError("the API server is away")

    async def delete(self, *nodes: NodeRef) -> Mapping[str, str]:
        raise NotImplementedError

    async def describe(self, node: NodeRef) -> NodeEvent | None:
        raise NotImplementedError

    def watch(self, request: WatchRequest) -> AsyncGenerator[tuple[NodeEvent, ...]]:
        raise NotImplementedError


async def test_one_nodes_trouble_is_not_anothers(temporal_client: Client, tmp_path: Path) -> None:
    job = LocalJob(tmp_path)
    requests = [job.request(rank) for rank in range(5)]
    together = NodesRequest(
        nodes=tuple(RequestedNode(node=one.node, name=one.name, task_queue=one.task_queue) for one in requests),
        spec=job.spec,
        job_id=job.job_id,
        job_first_run_id=job.job_first_run_id,
        group_id=job.group_id,
    )
    assert list(together.each) == requests
    result = await environment(job).run(NodeActivities(temporal_client, [Moody()]).create_nodes, together)
    assert result.created == {rank: CreatedNode(name=requests[rank].name) for rank in (0, 4)}
    assert result.refused == {1: "the image's name is invalid"}


def environment(job: LocalJob) -> ActivityEnvironment:
    """Runs activities as the job's group does."""
    environment = ActivityEnvironment()
    environment.info = replace(environment.info, workflow_id=job.group_id)
    return environment


class Group:
    """A client whose every workflow is this group."""

    def __init__(self) -> None:
        self.told: list[NodeEvents] = []

    def get_workflow_handle(self, workflow_id: str) -> Group:
        self.id = workflow_id
        return self

    async def signal(self, name: str, message: NodeEvents, *, rpc_timeout: timedelta) -> None:
        self.told.append(message)


async def test_a_group_is_told_once_what_its_nodes_wait_for(tmp_path: Path) -> None:
    job, group = LocalJob(tmp_path), Group()
    activities = NodeActivities(cast("Client", group), [Moody()])
    requests = [job.request(rank) for rank in range(5)]
    together = NodesRequest(
        nodes=tuple(RequestedNode(node=one.node, name=one.name, task_queue=one.task_queue) for one in requests),
        spec=job.spec,
        job_id=job.job_id,
        job_first_run_id=job.job_first_run_id,
        group_id=job.group_id,
    )
    await environment(job).run(activities.create_nodes, together)
    [message] = group.told
    assert [(event.rank, event.reason, event.queued, event.absent) for event in message.events] == [
        (2, "the base is not admitted", True, True),
        (3, "it could not be created yet: the API server is away", False, True),
    ]
    with pytest.raises(ApplicationError, match="the base is not admitted"):
        await environment(job).run(activities.create_node, requests[2])
    with pytest.raises(ConnectionError):
        await environment(job).run(activities.create_node, requests[3])
    assert len(group.told) == 1
