"""Tests of TrainingJob objects on a real API server, with the operator as a process and real workflows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import pytest
import yaml
from temporalio.client import Client as TemporalClient

from perdure.activities.nodes.local.backend import LocalBackend
from perdure.base.kubernetes import Changed, KubernetesApi, Listed, Removed
from perdure.base.kubernetes_errors import KubernetesError
from perdure.client.client import Client
from perdure.contract import JobPhase
from perdure.contract.names import job_workflow_id
from perdure.operator.resource import TrainingJobResource, collection
from perdure.worker import running_worker
from scripts.cluster.cluster import Cluster
from scripts.cluster.machine import API_ADDRESS
from tests.kubernetes.chart import rendered
from tests.kubernetes.pods import PodJob, TestCluster, role
from tests.kubernetes.test_chart import Release
from tests.kubernetes.test_kubernetes_job import perdure
from tests.support.allocation import REPOSITORY
from tests.support.command_line import end_nodes
from tests.support.waiting import eventually

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
DEFINITION = yaml.safe_load((REPOSITORY / "deploy" / "crds" / "trainingjobs.yaml").read_text())
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
"""The media type that `kubectl get` requests."""

Condition = Callable[[TrainingJobResource], bool]


class Resources:
    """The TrainingJobs of one namespace."""

    def __init__(self, api: KubernetesApi, namespace: str) -> None:
        self.api = api
        self.namespace = namespace

    async def apply(self, name: str, spec: dict[str, Any]) -> TrainingJobResource:
        content = {
            "apiVersion": "perdure.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name},
            "spec": spec,
        }
        return TrainingJobResource.model_validate(await self.api.create(collection(self.namespace), content))

    async def patch(self, name: str, spec: dict[str, Any]) -> int:
        """Returns the generation that this made."""
        made = await self.api.patch(f"{collection(self.namespace)}/{name}", {"spec": spec})
        assert made is not None
        return made["metadata"]["generation"]

    async def delete(self, name: str) -> None:
        await self.api.delete(f"{collection(self.namespace)}/{name}")

    async def until(self, name: str, condition: Condition, *, within: float = 60.0) -> TrainingJobResource:
        """The object once it is so."""
        known = None
        try:
            async with asyncio.timeout(within), aclosing(self._states(name)) as states:
                async for known in states:
                    if known is not None and condition(known):
                        return known
        except TimeoutError:
            raise AssertionError(f"not within {within} s: {known}") from None
        raise AssertionError("unreachable: states never end")

    async def until_gone(self, name: str, *, within: float = 60.0) -> list[TrainingJobResource]:
        """Returns the states of an object until it is gone."""
        seen: list[TrainingJobResource] = []
        async with asyncio.timeout(within), aclosing(self._states(name)) as states:
            async for known in states:
                if known is None:
                    return seen
                seen.append(known)
        raise AssertionError("unreachable: states never end")

    async def _states(self, name: str) -> AsyncGenerator[TrainingJobResource | None]:
        changes = self.api.follow(collection(self.namespace), fields=f"metadata.name={name}")
        async with aclosing(changes):
            async for change in changes:
                match change:
                    case Listed(()) | Removed():
                        yield None
                    case Listed((thing,)) | Changed(thing):
                        yield TrainingJobResource.model_validate(thing)
                    case _:
                        raise AssertionError(change)

    async def shown(self) -> list[dict[str, Any]]:
        """Returns the table of `kubectl get trainingjobs`: a mapping of column to cell for each object."""
        client: Any = self.api._client
        request = await client.param_serialize(
            "GET", collection(self.namespace), header_params={"Accept": TABLE}, auth_settings=["BearerToken"]
        )
        table = await (await client.call_api(*request)).response.json()
        columns = [column["name"] for column in table["columnDefinitions"] if not column["priority"]]
        return [dict(zip(columns, row["cells"], strict=False)) for row in table["rows"]]


class Operator:
    """`perdure operator`."""

    def __init__(
        self, kubeconfig: str | Path, namespace: str, address: str, log: Path, *, options: Sequence[str] = ()
    ) -> None:
        backends = ("--backend", "kubernetes", "--backend", "local")
        command = [sys.executable, "-m", "perdure.cli.main", "operator", "--namespace", namespace]
        self._command = [*command, *backends, *options]
        self._environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "TEMPORAL_ADDRESS": address}
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, env=self._environment, cwd=REPOSITORY, stdout=log, stderr=log
            )

    async def end(self, number: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        status = await asyncio.wait_for(self._process.wait(), 20)
        self._process = None
        return status

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        print(self._log.read_text())
        if self._process is not None:
            assert await self.end(signal.SIGTERM) == 0


POLICIES = "/apis/admissionregistration.k8s.io/v1"


async def protect_owners(api: KubernetesApi, helm: Path, namespace: str) -> None:
    """Installs the chart's admission policies for owners, and returns when they record owners in a namespace."""
    for policy in await rendered(helm, operator={"enabled": True}):
        if policy["metadata"]["name"].endswith("-owners"):
            await make_or_patch(api, f"{POLICIES}/{plural_of(policy)}", policy)
    probe = {"apiVersion": "perdure.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "probe"}}

    async def recorded() -> bool:
        with contextlib.suppress(KubernetesError):
            made = await api.create(collection(namespace), {**probe, "spec": sleeping()}, dry_run=True)
            return "owner" in made
        return False

    await eventually(recorded)


def plural_of(policy: dict[str, Any]) -> str:
    kind = policy["kind"].lower()
    return f"{kind}s" if kind.endswith("binding") else f"{kind.removesuffix('y')}ies"


async def make_or_patch(api: KubernetesApi, path: str, content: dict[str, Any]) -> None:
    """Makes an object of the cluster that may exist already."""
    try:
        await api.create(path, content)
    except KubernetesError as error:
        if error.reason != "AlreadyExists":
            raise
        await api.patch(f"{path}/{content['metadata']['name']}", content)


@pytest.fixture
async def resources(job: PodJob, helm: Path) -> AsyncIterator[Resources]:
    """The resources of the test's own namespace; the definition and its policies belong to the cluster, and stay."""
    await make_or_patch(job.api, DEFINITIONS, DEFINITION)

    async def served() -> bool:
        try:
            return await job.api.get(collection(job.namespace)) is not None
        except KubernetesError:
            return False

    await eventually(served)
    await protect_owners(job.api, helm, job.namespace)
    yield Resources(job.api, job.namespace)
    for left in await job.api.list(collection(job.namespace)):
        # No process removes it any more, and the namespace waits for that.
        path = f"{collection(job.namespace)}/{left['metadata']['name']}"
        await job.api.patch(path, {"metadata": {"finalizers": None}})


@pytest.fixture
async def local_nodes(temporal_client: TemporalClient, tmp_path: Path) -> AsyncIterator[None]:
    """A worker whose nodes are processes of this machine: quick, and the operator knows no difference."""
    connection = {"TEMPORAL_ADDRESS": address_of(temporal_client), "TEMPORAL_NAMESPACE": temporal_client.namespace}
    async with running_worker(temporal_client, backends=[LocalBackend(tmp_path, connection=connection)]):
        yield
    end_nodes(tmp_path)


def address_of(client: TemporalClient) -> str:
    return client.service_client.config.target_host


def sleeping(script: str = "exec sleep 600", *, nodes: int | str = 1, **spec: Any) -> dict[str, Any]:
    command = ["sh", "-c", script]
    limits = {"termination_grace_period": "1s"}
    return {"backend": "local", "limits": limits, "roles": {"worker": {"nodes": nodes, "command": command}}, **spec}


def is_running(nodes: str) -> Condition:
    return lambda known: (known.status.phase, known.status.nodes) == ("RUNNING", nodes)


def refused(generation: int) -> Condition:
    def is_so(known: TrainingJobResource) -> bool:
        accepted = known.status.condition("Accepted")
        return known.status.observed_generation == generation and accepted is not None and accepted.status == "False"

    return is_so


def is_the_operator_s(thing: dict[str, Any], kind: str) -> bool:
    return thing["kind"] == kind and thing["metadata"]["labels"]["app.kubernetes.io/component"] == "operator"


def documented_rights() -> dict[str, str]:
    text = (REPOSITORY / "docs" / "kubernetes-resource.md").read_text()
    rows = re.findall(r"^\| ([a-z/]+) \| ([a-z, ]+) \|$", text, re.MULTILINE)
    return {resource: verbs for resource, verbs in rows if resource != "resource"}


def operator_alone(cluster: TestCluster, address: str) -> dict[str, Any]:
    """Values of a release without workers."""
    repository, _, tag = cluster.agent_image.rpartition(":")
    return {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "temporal": {"address": address},
        "replicas": 0,
        "gateway": {"enabled": False},
        "operator": {"enabled": True},
    }


async def runs_of(client: TemporalClient, namespace: str, name: str) -> int:
    """Returns the number of runs that the name has had."""
    query = f"WorkflowId = '{job_workflow_id(namespace, name)}'"
    return (await client.count_workflows(query)).count


async def test_a_job_is_applied_read_and_deleted_with_its_pods(
    own_cluster: Cluster, cluster: TestCluster, helm: Path, job: PodJob, resources: Resources
) -> None:
    """The operator is the chart's own here: a pod, with the rights that it is documented to need."""
    (role_,) = [one for one in await rendered(helm, operator={"enabled": True}) if is_the_operator_s(one, "Role")]
    assert {rule["resources"][0]: ", ".join(rule["verbs"]) for rule in role_["rules"]} == documented_rights()
    name = f"b-{secrets.token_hex(3)}"
    async with (
        perdure(cluster, job.namespace) as (server, client),
        Release(helm, cluster.kubeconfig, job.namespace) as release,
    ):
        await release.apply(operator_alone(cluster, f"{API_ADDRESS}:{server.port}"))
        await resources.apply(
            name, {"roles": {"worker": role(nodes=2, rendezvous="env")}, "limits": {"termination_grace_period": "2s"}}
        )
        known = await resources.until(name, is_running("2/2"))
        (row,) = await resources.shown()
        assert {column: row[column] for column in row if column != "Age"} == {
            "Name": name,
            "Phase": "RUNNING",
            "Nodes": "2/2",
            "World": 2,
            "Step": None,
            "Restarts": 0,
        }
        truths = {one.type: (one.status, one.reason) for one in known.status.conditions}
        assert truths == {"Accepted": ("True", "Valid"), "Running": ("True", "Running")}
        pods = await job.api.list(job.pods_path, labels=f"perdure.dev/uid={known.status.uid}")
        assert len(pods) == 2

        await resources.delete(name)
        phases = [state.status.phase for state in await resources.until_gone(name)]
        assert "STOPPING" in phases
        assert await job.api.list(job.pods_path, labels=f"perdure.dev/uid={known.status.uid}") == []
        assert (await client.wait(name)).phase is JobPhase.CANCELLED


@pytest.mark.long("cluster-faults")
async def test_a_job_of_several_roles_is_shown_with_all_and_scaled_in_the_one_that_ends_it(
    cluster: TestCluster, resources: Resources, temporal_client: TemporalClient, local_nodes: None, tmp_path: Path
) -> None:
    async with Operator(
        cluster.kubeconfig, resources.namespace, address_of(temporal_client), tmp_path / "operator.log"
    ):
        (sleeper,) = sleeping()["roles"].values()
        await resources.apply("job", sleeping(roles={"helper": sleeper, "trainer": {**sleeper, "nodes": 2}}))

        def shows(**nodes: str) -> Condition:
            return lambda known: (
                {(one.name, one.phase, one.nodes) for one in known.status.roles}
                == {(name, "RUNNING", of_role) for name, of_role in nodes.items()}
            )

        known = await resources.until("job", shows(helper="1/1", trainer="2/2"))
        assert (known.status.nodes, known.status.replicas) == ("2/2", 2)
        await resources.patch("job", {"replicas": 1})
        known = await resources.until("job", shows(helper="1/1", trainer="1/1"))
        assert known.status.replicas == 1
        await resources.patch("job", {"roles": {"helper": {"nodes": 2}}})
        await resources.until("job", shows(helper="2/2", trainer="1/1"))
        await resources.patch("job", {"roles": {"helper": {"suspend": True}}})
        known = await resources.until("job", lambda known: known.status.roles[0].phase == "SUSPENDED")
        assert [one.phase for one in known.status.roles] == ["SUSPENDED", "RUNNING"]
        await resources.patch("job", {"roles": {"helper": {"suspend": False}}})
        await resources.until("job", shows(helper="2/2", trainer="1/1"))
        await resources.delete("job")
        await resources.until_gone("job")


@pytest.mark.long("cluster-faults")
async def test_what_can_change_live_is_carried_and_the_rest_refused_without_harm(
    cluster: TestCluster, resources: Resources, temporal_client: TemporalClient, local_nodes: None, tmp_path: Path
) -> None:
    async with Operator(
        cluster.kubeconfig, resources.namespace, address_of(temporal_client), tmp_path / "operator.log"
    ):
        first = await resources.apply("job", sleeping(nodes=2, suspend=True))
        held = await resources.until("job", lambda known: known.status.phase == "SUSPENDED")
        assert held.status.run_id == ""
        await resources.patch("job", {"suspend": False})
        started = await resources.until("job", is_running("2/2"))

        await resources.patch("job", {"roles": {"worker": {"nodes": 1}}})
        await resources.until("job", is_running("1/1"))
        await resources.patch("job", {"suspend": True})
        await resources.until("job", lambda known: known.status.phase == "SUSPENDED")
        await resources.patch("job", {"suspend": None})
        before = await resources.until("job", is_running("1/1"))

        change = await resources.patch("job", {"env": {"A": "1"}, "roles": {"worker": {"nodes": 3}}})
        known = await resources.until("job", refused(change))
        condition = known.status.condition("Accepted")
        assert condition is not None
        assert condition.reason == "ChangeRefused"
        assert condition.message.startswith("env.A: cannot change while the job runs")
        undone = await resources.patch("job", {"env": None, "roles": {"worker": {"nodes": 1}}})
        after = await resources.until("job", lambda known: known.status.accepts(undone))
        assert (after.status.run_id, after.status.generation) == (started.status.run_id, before.status.generation)

        await resources.delete("job")
        await resources.until_gone("job")
        client = Client(temporal=temporal_client, namespace=resources.namespace)
        assert (await client.wait("job")).phase is JobPhase.CANCELLED
        second = await resources.apply("job", sleeping())
        again = await resources.until("job", is_running("1/1"))
        assert second.metadata.uid != first.metadata.uid
        assert again.status.run_id != started.status.run_id


async def test_a_wrong_object_says_so_and_can_be_mended(
    cluster: TestCluster, resources: Resources, temporal_client: TemporalClient, local_nodes: None, tmp_path: Path
) -> None:
    with pytest.raises(KubernetesError, match=r"spec\.roles\.worker\.nodes"):
        await resources.apply("job", sleeping(nodes="four"))
    with pytest.raises(KubernetesError, match="at most 63 lowercase letters"):
        await resources.apply("j" * 64, sleeping())
    client = Client(temporal=temporal_client, namespace=resources.namespace)
    async with Operator(
        cluster.kubeconfig, resources.namespace, address_of(temporal_client), tmp_path / "operator.log"
    ):
        typo = await resources.apply("job", sleeping("exit 7", retry={"max_restart": 1}, ttl_after_finished="1h"))
        known = await resources.until("job", refused(1))
        with pytest.raises(ValueError, match="max_restart") as said:
            typo.job()
        condition = known.status.condition("Accepted")
        assert condition is not None
        assert (condition.reason, condition.message) == ("InvalidSpec", str(said.value))
        assert (known.status.phase, known.metadata.finalizers) == ("REFUSED", ())

        await resources.patch("job", {"retry": {"max_restart": None, "max_restarts": 1}})
        # Until the operator has seen the change, the object is refused, and finished with that.
        failed = await resources.until("job", lambda known: known.status.finished and known.status.phase != "REFUSED")
        why = failed.status.condition("Failed")
        assert why is not None
        assert (why.status, why.reason) == ("True", "UserCode")
        assert why.message == (await client.wait("job")).reason
        await resources.patch("job", {"ttl_after_finished": "3s"})
        await resources.until_gone("job")
        assert failed.status.finished_at is not None
        assert datetime.now(UTC) - failed.status.finished_at >= timedelta(seconds=3)

        await client.submit({"name": "taken", "namespace": resources.namespace, **sleeping()})
        await resources.apply("taken", sleeping())
        known = await resources.until("taken", refused(1))
        condition = known.status.condition("Accepted")
        assert condition is not None
        assert condition.reason == "NameTaken"
        await resources.delete("taken")
        await resources.until_gone("taken")
        assert (await client.status("taken")).phase is not JobPhase.STOPPING


@pytest.mark.long("cluster-faults")
async def test_nothing_is_missed_or_started_twice_while_operator_and_api_server_are_down(
    own_cluster: Cluster,
    cluster: TestCluster,
    resources: Resources,
    temporal_client: TemporalClient,
    local_nodes: None,
    tmp_path: Path,
) -> None:
    go = tmp_path / "go"
    spec = sleeping(f"until [ -e {go} ]; do sleep 0.1; done")
    client = Client(temporal=temporal_client, namespace=resources.namespace)
    async with Operator(
        cluster.kubeconfig, resources.namespace, address_of(temporal_client), tmp_path / "operator.log"
    ) as operator:
        for name in ("ends", "forgotten"):
            await resources.apply(name, spec)
            await resources.until(name, is_running("1/1"))
        await operator.end(signal.SIGKILL)
        # As if it had been killed between a start and the first report of it.
        path = f"{collection(resources.namespace)}/forgotten/status"
        forgotten = await resources.api.patch(path, {"status": None})
        assert forgotten is not None
        assert "status" not in forgotten

        own_cluster.kill_api_server()
        try:
            await operator.start()
            go.touch()
            for name in ("ends", "forgotten"):
                assert (await client.wait(name)).phase is JobPhase.SUCCEEDED
        finally:
            await asyncio.to_thread(own_cluster.start_api_server)
        for name in ("ends", "forgotten"):
            known = await resources.until(name, lambda known: known.status.finished)
            succeeded = known.status.condition("Succeeded")
            assert succeeded is not None
            assert succeeded.status == "True"
            assert await runs_of(temporal_client, resources.namespace, name) == 1
            await resources.delete(name)
            await resources.until_gone(name)
