"""Tests of DLRover's ScalePlans for TrainingJobs, on a real API server and with the operator as a process."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import yaml
from temporalio.client import Client as TemporalClient

from perdure.base.kubernetes import Listed
from perdure.base.kubernetes_errors import KubernetesError
from perdure.client.client import Client
from perdure.operator.resource import SCALED_ROLES
from perdure.operator.scale_plans import REQUESTS, collection
from tests.kubernetes.pods import TestCluster
from tests.kubernetes.test_operator import (
    DEFINITIONS,
    Operator,
    Resources,
    address_of,
    is_running,
    local_nodes,
    make_or_patch,
    resources,
    sleeping,
)
from tests.support.waiting import eventually

__all__ = ["local_nodes", "resources"]

DEFINITION = yaml.safe_load((Path(__file__).parent / "crds" / "dlrover-scaleplans.yaml").read_text())


class Plans:
    """The ScalePlans of one namespace."""

    def __init__(self, resources: Resources) -> None:
        self.api = resources.api
        self.path = collection(resources.namespace)

    async def apply(self, name: str, job: str = "job", **spec: Any) -> dict[str, Any]:
        labels = {"elasticjob.dlrover/name": job, "scale-type": "manual"}
        content = {"apiVersion": "elastic.iml.github.io/v1alpha1", "kind": "ScalePlan"}
        metadata = {"name": name, "labels": labels}
        return await self.api.create(self.path, {**content, "metadata": metadata, "spec": {"ownerJob": job, **spec}})

    async def ends(self, name: str, *, within: float = 120) -> dict[str, Any]:
        """Returns the plan once it was carried out or refused."""
        known: dict[str, Any] = {}
        async with asyncio.timeout(within), aclosing(self.api.follow(self.path)) as changes:
            async for change in changes:
                things = change.objects if isinstance(change, Listed) else (change.object,)
                known.update({thing["metadata"]["name"]: thing for thing in things})
                if name in known and known[name].get("status", {}).get("phase") in ("Succeeded", "Failed"):
                    return known[name]
        raise AssertionError("unreachable: changes never end")

    async def events(self, name: str) -> dict[str, str]:
        """Returns the messages of its Events by their reasons."""
        path = self.path.replace("apis/elastic.iml.github.io/v1alpha1", "api/v1").replace("scaleplans", "events")
        found = [event for event in await self.api.list(path) if event["involvedObject"]["name"] == name]
        assert {event["involvedObject"]["kind"] for event in found} == {"ScalePlan"}
        return {event["reason"]: event["message"] for event in found}


@pytest.fixture
async def plans(resources: Resources) -> Plans:
    found = Plans(resources)
    await make_or_patch(resources.api, DEFINITIONS, DEFINITION)

    async def served() -> bool:
        try:
            return await resources.api.get(found.path) is not None
        except KubernetesError:
            return False

    await eventually(served)
    return found


@pytest.mark.long("cluster-faults")
@pytest.mark.timeout(420)
async def test_a_plan_is_carried_out_once_and_the_object_states_what_it_says(
    cluster: TestCluster,
    plans: Plans,
    resources: Resources,
    temporal_client: TemporalClient,
    local_nodes: None,
    tmp_path: Path,
) -> None:
    address = address_of(temporal_client)
    client = Client(address=address, namespace=resources.namespace)
    operator = Operator(cluster.kubeconfig, resources.namespace, address, tmp_path / "operator.log")
    async with operator:
        (sleeper,) = sleeping()["roles"].values()
        made = await resources.apply("job", sleeping(roles={"helper": sleeper, "trainer": {**sleeper, "nodes": "1:3"}}))
        await resources.until("job", is_running("3/3"))

        # One plan for both roles, with a node to replace, and a field that has no effect.
        await plans.apply(
            "both",
            replicaResourceSpecs={"trainer": {"replicas": 2}, "helper": {"replicas": 2}},
            migratePods=[{"name": "job-edljob-trainer-1"}],
            psHosts=["x"],
        )
        await plans.apply("of-another-system", job="elastic", replicaResourceSpecs={"worker": {"replicas": 2}})
        plan = await plans.ends("both")
        assert plan["status"]["phase"] == "Succeeded"
        assert plan["status"]["createTime"] <= plan["status"]["finishTime"]
        events = await plans.events("both")
        assert events["Succeeded"] == "scale helper to 2 nodes; scale trainer to 2 nodes; replace node 1 of trainer"
        assert "spec.psHosts" in events["LeftOut"]

        def followed(known: Any) -> bool:
            nodes = {one.name: one.nodes for one in known.status.roles}
            return known.status.phase == "RUNNING" and nodes == {"helper": "2/2", "trainer": "2/2"}

        known = await resources.until("job", followed)
        assert known.spec["replicas"] == 2
        assert json.loads(known.metadata.annotations[SCALED_ROLES]) == {
            "helper": {"stated": "1", "nodes": 2, "plan": "both"}
        }
        assert known.owner == made.owner, "a plan makes its author no owner"
        replaced = [node for node in await client.nodes("job", role="trainer") if node.rank == 1]
        assert max(node.incarnation for node in replaced) == 2

        # An operator that dies after it has written down what a plan requests sends the same again, and nothing more.
        await plans.api.patch(f"{plans.path}/both", {"metadata": {"labels": {"seen": "again"}}})
        await operator.end(signal.SIGKILL)
        status = {"phase": "Scaling", "finishTime": None}
        assert await plans.api.patch(f"{plans.path}/both/status", {"status": status})
        await operator.start()
        again = await plans.ends("both")
        assert again["metadata"]["annotations"][REQUESTS] == plan["metadata"]["annotations"][REQUESTS]
        replaced = [node for node in await client.nodes("job", role="trainer") if node.rank == 1]
        assert max(node.incarnation for node in replaced) == 2

        # What cannot be honoured is refused as a whole.
        await plans.apply(
            "wrong", replicaResourceSpecs={"trainer": {"replicas": 3}}, removePods=[{"name": "job-edljob-helper-0"}]
        )
        assert (await plans.ends("wrong"))["status"]["phase"] == "Failed"
        assert "spec.removePods[0]: helper would keep" in (await plans.events("wrong"))["Failed"]

        # The object decides again once it states another number.
        await resources.patch("job", {"roles": {"helper": {"nodes": 3}}})
        await resources.until("job", lambda known: {one.nodes for one in known.status.roles} == {"3/3", "2/2"})
        other = await plans.api.get(f"{plans.path}/of-another-system")
        assert other is not None
        assert "status" not in other
        await resources.delete("job")
        await resources.until_gone("job")
