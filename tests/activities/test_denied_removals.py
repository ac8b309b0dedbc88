"""Tests of removals that a permission or a rule of the backend's system denies."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from perdure.activities.nodes.activities import NodeActivities
from perdure.activities.nodes.backend import RemovalDenied
from perdure.contract import CreatedNode, GroupRef, NodeEvent, NodeRef, NodeRequest, NodesRef, WatchRequest
from perdure.contract.names import REMOVAL_DENIED
from tests.activities.local_nodes import LocalJob


class Denying:
    """A backend whose system lets it remove nothing."""

    name = "local"

    async def create(self, request: NodeRequest) -> CreatedNode:
        raise NotImplementedError

    async def delete(self, *nodes: NodeRef) -> Mapping[str, str]:
        raise RemovalDenied("forbidden")

    async def clear(self, group: GroupRef) -> None:
        raise RemovalDenied("forbidden")

    async def describe(self, node: NodeRef) -> NodeEvent | None:
        raise NotImplementedError

    def watch(self, request: WatchRequest) -> AsyncGenerator[tuple[NodeEvent, ...]]:
        raise NotImplementedError


@pytest.mark.parametrize("what", ["nodes", "group"])
@pytest.mark.parametrize(("attempt", "final"), [(1, False), (3, False), (4, True)])
async def test_it_is_tried_a_few_times_before_the_group_decides(
    temporal_client: Client, tmp_path: Path, what: str, attempt: int, final: bool
) -> None:
    job = LocalJob(tmp_path)
    activities = NodeActivities(temporal_client, [Denying()])
    environment = ActivityEnvironment()
    environment.info = replace(environment.info, workflow_id=job.group_id, attempt=attempt)
    node = job.ref()
    group = GroupRef(uid=node.uid, role=node.role, group=0, backend="local", namespace=node.namespace, grace=node.grace)
    removal = (
        environment.run(activities.delete_nodes, NodesRef(nodes=(node,)))
        if what == "nodes"
        else environment.run(activities.clear_group, group)
    )
    with pytest.raises(ApplicationError, match="forbidden") as told:
        await removal
    assert (told.value.type, told.value.non_retryable) == (REMOVAL_DENIED, final)
