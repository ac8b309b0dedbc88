"""The chart's gateway on a real cluster: jobs are repaired through it, and training code gets nothing by it."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from perdure.base.credentials.names import AUDIENCE, GRANT_HEADER, TOKEN_HEADER
from perdure.base.encryption.keys import KEYS_FILE_VARIABLE, create_keys
from perdure.base.kubernetes import KubernetesApi
from perdure.client.client import Client
from perdure.client.connection import Endpoint
from perdure.contract import JobPhase
from scripts.cluster.certificates import Certificates
from scripts.cluster.host_programs import SITE_POLICY, with_host_programs
from scripts.cluster.images import BARE_IMAGE
from scripts.cluster.machine import API_ADDRESS, node_address
from tests.kubernetes.chart import Release, gateway_front, gateways
from tests.kubernetes.conftest import results
from tests.kubernetes.pods import PodJob, TestCluster, job_in_a_namespace
from tests.support.command_line import PERDURE
from tests.support.temporal_server import dev_server
from tests.support.waiting import eventually
from tests.system.joined import machines
from tests.system.site import SCRIPT, Job

__all__ = ["results"]

TASK_QUEUE = "gateway"
NO_TEMPORAL = {"TEMPORAL_ADDRESS": "", "TEMPORAL_NAMESPACE": "", "PERDURE_TASK_QUEUE": ""}
KUBELETS = " ".join(map(node_address, range(2)))
SHELL = Path(__file__).with_name("shell.py")


class Installed:
    """A release with a gateway."""

    def __init__(self, client: Client, api: KubernetesApi, namespace: str) -> None:
        self.client, self.api, self.namespace = client, api, namespace

    async def gateways(self) -> list[dict[str, Any]]:
        return await gateways(self.api, self.namespace)

    async def authority(self) -> bytes:
        """The authority of the gateways' certificate, which agents trust."""
        secret = await self.api.get(f"/api/v1/namespaces/{self.namespace}/secrets/perdure-gateway")
        assert secret
        return base64.b64decode(secret["data"]["ca.crt"])

    async def kill_gateways(self, count: int) -> None:
        """Ends so many gateways at once, without grace."""
        for pod in (await self.gateways())[:count]:
            path = f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}"
            await self.api.delete(path, grace=0, uid=pod["metadata"]["uid"])

    async def replace_gateways(self, count: int) -> None:
        """Kills so many, and returns when as many others serve."""
        before = await self._ready()
        await self.kill_gateways(count)

        async def replaced() -> bool:
            now = await self._ready()
            return len(now) == len(before) and len(now - before) == count

        await eventually(replaced)

    async def _ready(self) -> set[str]:
        return {
            pod["metadata"]["uid"]
            for pod in await self.gateways()
            for one in pod["status"].get("conditions", ())
            if (one["type"], one["status"]) == ("Ready", "True")
        }


class SiteCertificate:
    """A certificate of the site's own authority, as cert-manager would make it."""

    name = "gateway.example.org"

    def __init__(self, folder: Path) -> None:
        certificates = Certificates(folder)
        certificates.create()
        self.authority = certificates.authority
        self._files = certificates.issue("gateway", user=self.name, hosts=[f"DNS:{self.name}"])

    def secret(self, name: str) -> dict[str, Any]:
        certificate, key = self._files
        entries = {"tls.crt": certificate, "tls.key": key, "ca.crt": self.authority}
        content = {entry: path.read_text() for entry, path in entries.items()}
        return {"metadata": {"name": name}, "type": "kubernetes.io/tls", "stringData": content}


@asynccontextmanager
async def installed(
    cluster: TestCluster, helm: Path, job: PodJob, *, keys: Path | None = None, site: SiteCertificate | None = None
) -> AsyncIterator[Installed]:
    """The chart as it is, but for the addresses: the cluster has no name server.

    Args:
        cluster: where it is installed.
        helm: the program.
        job: whose namespace may run jobs.
        keys: a file of payload keys.
        site: the certificate that machines outside the cluster are shown.
    """
    repository, _, tag = cluster.agent_image.rpartition(":")
    async with job_in_a_namespace(cluster) as own, dev_server(options=("--ip", "0.0.0.0")) as server:
        client = Client(endpoint=Endpoint(address=server.address, task_queue=TASK_QUEUE), namespace=job.namespace)
        release = Installed(client, job.api, own.namespace)
        async with (
            gateway_front(job.api, own.namespace) as address,
            Release(helm, cluster.kubeconfig, own.namespace) as chart,
        ):
            if keys:
                secret = {"metadata": {"name": "payload-keys"}, "stringData": {"keys.json": keys.read_text()}}
                await job.api.create(f"/api/v1/namespaces/{own.namespace}/secrets", secret)
            outside: dict[str, Any] = {}
            if site:
                await job.api.create(f"/api/v1/namespaces/{own.namespace}/secrets", site.secret("site-tls"))
                outside = {
                    "outsideAddress": address,
                    "tls": {"secret": "site-tls", "serverName": site.name},
                }
            small = {"resources": {"requests": {"cpu": "50m", "memory": "128Mi"}}}
            await chart.apply(
                {
                    "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
                    "temporal": {
                        "address": f"{API_ADDRESS}:{server.port}",
                        "taskQueue": TASK_QUEUE,
                        "payloadKeysSecret": "payload-keys" if keys else "",
                    },
                    "gateway": {"address": address, **outside, **small},
                    "jobNamespaces": [job.namespace],
                    "sitePolicy": yaml.safe_load(SITE_POLICY),
                    **small,
                }
            )
            yield release


def job_of(namespace: str, command: list[str], *folders: Path, nodes: int = 1, **role: Any) -> dict[str, Any]:
    worker = {"nodes": nodes, "image": BARE_IMAGE, "command": command, "pod_template": with_host_programs(*folders)}
    return {
        "name": f"g-{secrets.token_hex(4)}",
        "namespace": namespace,
        "backend": "kubernetes",
        "env": {"OMP_NUM_THREADS": "1"},
        "limits": {"termination_grace_period": "2s"},
        "roles": {"worker": worker | role},
    }


@pytest.mark.timeout(400)
@pytest.mark.long("cluster-faults")
async def test_a_job_is_repaired_through_the_gateway_and_does_not_notice_its_replacement(
    cluster: TestCluster, helm: Path, job: PodJob, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Payloads are encrypted, and the pods of the job have no key."""
    keys = create_keys(tmp_path / "keys.json").path
    monkeypatch.setenv(KEYS_FILE_VARIABLE, str(keys))
    async with installed(cluster, helm, job, keys=keys) as release:
        client = release.client
        spec = job_of(job.namespace, ["torchrun", str(SCRIPT), str(results)], results, nodes=2)
        await client.submit(spec)
        training = Job(client, spec["name"], (await client.status(spec["name"])).uid, results)
        before = await training.running(nodes=2)
        await training.stepping(generation=before.generation, ranks=2)

        # One after the other, as machines and upgrades do: the other one continues.
        for _ in range(2):
            await release.replace_gateways(1)
        await training.undisturbed(ranks=2, seconds=5)
        assert await training.incidents() == []
        # No gateway is left while a container starts: nodes may be unreachable, and training continues.
        await release.replace_gateways(2)
        await training.undisturbed(ranks=2, seconds=5)
        assert (await training.status()).generation == before.generation

        [victim] = [pod["metadata"]["name"] for pod in await job.pods() if "-worker-1-" in pod["metadata"]["name"]]
        await job.api.delete(f"{job.pods_path}/{victim}")
        repaired = await training.running(nodes=2, after=before.generation)
        await training.stepping(generation=repaired.generation, ranks=2)
        await client.cancel(spec["name"])
        assert (await client.wait(spec["name"])).phase is JobPhase.CANCELLED


async def test_a_shell_in_a_training_container_finds_nothing(
    cluster: TestCluster, helm: Path, job: PodJob, results: Path
) -> None:
    async with installed(cluster, helm, job) as release:
        client = release.client
        authority = results / "authority.pem"
        authority.write_bytes(await release.authority())
        command = ["sh", "-c", f"python {SHELL} {API_ADDRESS} {authority} {KUBELETS}; exec sleep 600"]
        spec = job_of(job.namespace, command, SHELL.parent, results, rendezvous="env", nproc_per_node=1)
        await client.submit(spec)
        found: dict[str, Any] = {}
        async with asyncio.timeout(300), aclosing(client.logs(spec["name"], follow=True)) as log:
            async for line in log:
                if line.text.startswith("{"):
                    found = json.loads(line.text)
                    break
        [pod] = await job.pods()
        await client.cancel(spec["name"])
        await client.wait(spec["name"])
    gateway = found.pop("gateway")
    assert found == {
        "temporal variables": [],
        "secrets in files": [],
        "agents' files": [],
        "others' processes": [],
        "metadata": found["metadata"],
        # They are reached here, since the cluster's network enforces no policies, without credentials.
        "api server": 403,
        "kubelets": [401, 401],
    }
    assert found["metadata"] != "connected"
    # The only server that the agent is connected to is the gateway, which does not know this caller.
    [answers] = gateway.values()
    assert answers == ["TLSv1.3", "UNIMPLEMENTED", "UNAUTHENTICATED", "UNAUTHENTICATED"]
    # Who may read pods reads the grant, which is worth nothing without the pod's token, which is not there.
    text = json.dumps(pod["spec"])
    assert "TEMPORAL_" not in text
    [token] = [source for volume in pod["spec"]["volumes"] for source in volume.get("projected", {}).get("sources", ())]
    assert token["serviceAccountToken"]["audience"] == AUDIENCE
    mounts = {one["name"]: {m["name"] for m in one["volumeMounts"]} for one in _containers(pod)}
    assert [name for name, volumes in mounts.items() if "perdure-token" in volumes] == ["perdure-agent"]


def _containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]


@pytest.mark.long("joining")
async def test_a_machine_outside_joins_by_the_sites_name_and_pods_by_the_gateways_own(
    cluster: TestCluster, helm: Path, job: PodJob, tmp_path: Path
) -> None:
    """Of address, authority and name, the ticket's maker names none: the workers know what the chart's values say."""
    site = SiteCertificate(tmp_path / "pki")
    async with installed(cluster, helm, job, site=site) as release, machines(tmp_path, NO_TEMPORAL) as outside:
        client = release.client
        in_pods = job_of(job.namespace, ["true"], rendezvous="env", nproc_per_node=1)
        await client.submit(in_pods)
        joined = {"name": f"j-{secrets.token_hex(4)}", "namespace": job.namespace, "backend": "joined"}
        await client.submit(joined | {"roles": {"worker": {"nodes": 1, "command": ["true"]}}})
        temporal = {"TEMPORAL_ADDRESS": client.endpoint.address, "PERDURE_TASK_QUEUE": TASK_QUEUE}
        made = outside.start(*PERDURE, "ticket", joined["name"], "-n", job.namespace, environment=temporal)
        assert await made.leave() == 0, made.text
        path = tmp_path / f"{joined['name']}.ticket"
        ticket = json.loads(path.read_text())
        assert (ticket["authority"], ticket["server_name"]) == (site.authority.read_text(), site.name)
        node = outside.join(joined["name"], "a", "--ticket", str(path))
        assert await node.leave() == 0, node.text
        for name in (joined["name"], in_pods["name"]):
            assert (await client.wait(name)).phase is JobPhase.SUCCEEDED


async def test_a_token_of_another_pod_or_audience_or_that_has_expired_or_of_a_pod_that_is_gone_is_refused(
    cluster: TestCluster, helm: Path, job: PodJob
) -> None:
    """A neighbour in the namespace reads the grant in the manifest, and asks for tokens of the same service account."""
    async with installed(cluster, helm, job) as release:
        client = release.client
        spec = job_of(job.namespace, ["sleep", "600"], nodes=2, rendezvous="env", nproc_per_node=1)
        await client.submit(spec)

        async def both() -> list[dict[str, Any]]:
            return pods if len(pods := await job.pods()) == 2 else []

        pod, neighbour = await eventually(both)
        [config] = [
            json.loads(one["value"])
            for container in _containers(pod)
            for one in container.get("env", ())
            if one["name"] == "PERDURE_PREPARE_AGENT_CONFIG"
        ]

        async def answer(token: str) -> tuple[str, str]:
            return await describe(
                config, ((GRANT_HEADER, config["gateway"]["grant"]), (TOKEN_HEADER, f"Bearer {token}"))
            )

        foreign, unbound = await token_for(job, "https://kubernetes.default.svc"), await token_for(job, AUDIENCE)
        others, own, unused = [await token_for(job, AUDIENCE, bound_to=one) for one in (neighbour, pod, pod)]
        refused = [await answer(token) for token in (foreign, unbound, others)]
        # Otherwise the refusals would prove nothing.
        assert await answer(own) == ("OK", "")
        if cluster.own:
            key = cluster.own.certificates.service_account_key
            assert await answer(signed_again(own, key, valid=timedelta(minutes=10))) == ("OK", "")
            status, reason = await answer(signed_again(own, key, valid=-timedelta(minutes=10)))
            assert (status, "not valid" in reason) == ("UNAUTHENTICATED", True), reason
        name = pod["metadata"]["name"]
        await job.api.delete(f"{job.pods_path}/{name}", grace=0)

        async def gone() -> bool:
            return name not in {one["metadata"]["name"] for one in await job.pods()}

        await eventually(gone)
        refused.append(await answer(unused))
        await client.cancel(spec["name"])
        await client.wait(spec["name"])
    assert {status for status, _ in refused} == {"UNAUTHENTICATED"}
    reasons = ("not valid", "not bound to a pod", "different pods", "not valid")
    assert [reason for (_, said), reason in zip(refused, reasons, strict=True) if reason not in said] == [], refused


async def token_for(job: PodJob, audience: str, *, bound_to: dict[str, Any] | None = None) -> str:
    """A token of the service account of the job's pods."""
    spec: dict[str, Any] = {"audiences": [audience]}
    if bound_to:
        metadata = bound_to["metadata"]
        spec["boundObjectRef"] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": metadata["name"],
            "uid": metadata["uid"],
        }
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    path = f"/api/v1/namespaces/{job.namespace}/serviceaccounts/default/token"
    return (await job.api.create(path, request))["status"]["token"]


def signed_again(token: str, key: Path, *, valid: timedelta) -> str:
    """The token as the API server would have signed it for another time: the shortest that it grants is ten minutes."""
    signer = load_pem_private_key(key.read_bytes(), password=None)
    assert isinstance(signer, RSAPrivateKey)
    header, claims, _ = (base64.urlsafe_b64decode(part + "==") for part in token.split("."))
    ends = int(time.time() + valid.total_seconds())
    times = {"iat": ends - 3600, "nbf": ends - 3600, "exp": ends}
    content = b".".join(map(_unpadded, (header, json.dumps(json.loads(claims) | times).encode())))
    return b".".join((content, _unpadded(signer.sign(content, PKCS1v15(), SHA256())))).decode()


def _unpadded(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


async def describe(config: dict[str, Any], headers: tuple[tuple[str, str], ...]) -> tuple[str, str]:
    """Asks the gateway of an agent's configuration for its job."""
    import grpc
    from temporalio.api.common.v1 import WorkflowExecution
    from temporalio.api.workflowservice.v1 import DescribeWorkflowExecutionRequest

    from perdure.base.credentials.names import GATEWAY_NAME
    from perdure.gateway.calls import SERVICE

    connection = config["gateway"]
    request = DescribeWorkflowExecutionRequest(
        namespace=connection["namespace"], execution=WorkflowExecution(workflow_id=config["job_id"])
    )
    trust = grpc.ssl_channel_credentials(connection["authority"].encode())
    options = [("grpc.ssl_target_name_override", GATEWAY_NAME)]
    async with grpc.aio.secure_channel(connection["address"], trust, options=options) as channel:
        try:
            method: Any = channel.unary_unary(f"/{SERVICE}/DescribeWorkflowExecution")
            await method(request.SerializeToString(), metadata=headers, timeout=20)
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details() or ""
    return "OK", ""
