"""Many nodes by one activity: what succeeds is told, and what does not is left to be asked for by itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

from temporalio.client import Client
from temporalio.testing import ActivityEnvironment

from activities.nodes.activities import NodeActivities
from activities.nodes.backend import NodeNotYet, NodeRefused
from tests.activities.local_nodes import LocalJob
from workflows.messages import CreatedNode, NodeEvent, NodeOrder, NodeRef, NodeRequest, NodesRequest, WatchRequest


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

    async def delete(self, *nodes: NodeRef) -> None:
        raise NotImplementedError

    async def describe(self, node: NodeRef) -> NodeEvent | None:
        raise NotImplementedError

    def watch(self, request: WatchRequest) -> AsyncGenerator[tuple[NodeEvent, ...]]:
        raise NotImplementedError


async def test_one_nodes_trouble_is_not_anothers(temporal_client: Client, tmp_path: Path) -> None:
    job = LocalJob(tmp_path)
    requests = [job.request(rank) for rank in range(5)]
    together = NodesRequest(
        orders=tuple(NodeOrder(node=one.node, name=one.name, task_queue=one.task_queue) for one in requests),
        spec=job.spec,
        job_id=job.job_id,
        job_first_run_id=job.job_first_run_id,
        group_id=job.group_id,
    )
    assert list(together.each) == requests
    result = await ActivityEnvironment().run(NodeActivities(temporal_client, [Moody()]).create_nodes, together)
    assert result.created == {rank: CreatedNode(name=requests[rank].name) for rank in (0, 4)}
    assert result.refused == {1: "the image's name is invalid"}
