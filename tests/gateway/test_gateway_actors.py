"""Tests of the grants that actors of a Ray cluster are given: what another user of it can do with a stolen one.

All users of such a cluster may read what an actor was given; see docs/security.md.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import grpc
import pytest
from temporalio.client import Client
from temporalio.service import RPCStatusCode

from perdure.activities.nodes.ray.settings import RaySettings
from perdure.activities.nodes.ray.task import NodeTask, task_of
from perdure.base.credentials.grants import Grant
from perdure.base.credentials.names import GRANT_HEADER, TOKEN_HEADER
from tests.activities.test_ray_backend import UID, request
from tests.agent.harness import Workflows
from tests.gateway.attacker import Attacker
from tests.gateway.site import GatewaySite


@pytest.fixture
def settings(site: GatewaySite, tmp_path: Path) -> RaySettings:
    """Those of a worker that serves a Ray cluster whose agents connect to the gateway."""
    for name, content in site.keyring.to_entries().items():
        (tmp_path / name).write_text(content)
    variables = {
        "PERDURE_RAY_ADDRESS": "head:6379",
        "PERDURE_RAY_GATEWAY_ADDRESS": site.address,
        "PERDURE_RAY_GATEWAY_KEYRING": str(tmp_path),
        "TEMPORAL_NAMESPACE": site.server.namespace,
    }
    return RaySettings.from_environment(variables, connection={})


def given(settings: RaySettings, workflows: Workflows, rank: int = 0) -> NodeTask:
    """What an actor is given, as another user of the cluster reads it."""
    ids = {"job_id": workflows.job.id, "group_id": workflows.group.id}
    node = request(rank=rank).model_copy(update={**ids, "task_queue": f"node/{UID}/worker-{rank}/1"})
    task = task_of(node, connection=settings.connection, gateway=settings.gateway)
    return NodeTask.model_validate_json(task.model_dump_json())


def proofs(task: NodeTask) -> tuple[str, str]:
    assert task.gateway is not None
    assert task.token is not None
    return task.gateway.grant, task.token.get_secret_value()


async def stolen(site: GatewaySite, task: NodeTask) -> Client:
    """Temporal's SDK with what an actor was given."""
    grant, token = proofs(task)
    return await site.client(Grant.verify(grant, site.keyring.signing_keys), token)


async def test_the_grant_of_an_actor_is_worth_nothing_without_its_own_token(
    site: GatewaySite, workflows: Workflows, settings: RaySettings
) -> None:
    grant, token = proofs(given(settings, workflows))
    _, of_another = proofs(given(settings, workflows, rank=1))
    for bearer in (secrets.token_hex(16), of_another, grant):
        headers = ((GRANT_HEADER, grant), (TOKEN_HEADER, f"Bearer {bearer}"))
        status, _ = await site.describe(workflows.job.id, *headers)
        assert status is grpc.StatusCode.UNAUTHENTICATED
    headers = ((GRANT_HEADER, grant), (TOKEN_HEADER, f"Bearer {token}"))
    assert await site.describe(workflows.job.id, *headers) == (grpc.StatusCode.OK, "")


async def test_both_of_one_actor_speak_for_its_own_incarnation_only(
    site: GatewaySite, workflows: Workflows, settings: RaySettings
) -> None:
    task = given(settings, workflows)
    thief = Attacker(site, workflows, await stolen(site, task))
    own = {"uid": UID, "role": "worker", "rank": 0, "incarnation": 1, "token": "t"}
    for other in ({"rank": 1}, {"incarnation": 2}, {"role": "reward"}, {"uid": "bbbbbbbb"}):
        message = {"sender": {**own, **other}, "time": "2026-01-01T00:00:00Z"}
        await thief.refused(thief.signal(workflows.group.id, "joined", message), RPCStatusCode.PERMISSION_DENIED)
    for queue in (f"node/{UID}/worker-1/1", f"node/{UID}/worker-0/2", "perdure"):
        await thief.refused(thief.poll(queue), RPCStatusCode.PERMISSION_DENIED)
    for workflow in ("job/default/another", f"job/default/another/{UID}/worker/0"):
        await thief.refused(thief.signal(workflow, "failure", {"sender": own}), RPCStatusCode.PERMISSION_DENIED)
