"""The chart's page on a real cluster: service accounts see and change what their rights on TrainingJobs allow."""

from __future__ import annotations

import re
import secrets
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from yarl import URL

from perdure.base.kubernetes import KubernetesApi
from perdure.client.client import Client
from perdure.client.connection import Endpoint
from perdure.contract import JobPhase
from perdure.page.users import AUDIENCE
from scripts.cluster.certificates import Certificates
from scripts.cluster.host_programs import SITE_POLICY
from scripts.cluster.machine import API_ADDRESS
from tests.kubernetes.chart import Release, gateway_front
from tests.kubernetes.pods import PodJob, TestCluster, job_in_a_namespace
from tests.security.cluster.test_gateway import job_of
from tests.support.fronts import service_front
from tests.support.temporal_server import dev_server
from tests.support.waiting import eventually

TASK_QUEUE = "page"
RBAC = "/apis/rbac.authorization.k8s.io/v1"


async def pages(api: KubernetesApi, namespace: str) -> list[dict[str, Any]]:
    return await api.list(f"/api/v1/namespaces/{namespace}/pods", labels="app.kubernetes.io/component=page")


@asynccontextmanager
async def installed(
    cluster: TestCluster, helm: Path, job: PodJob, folder: Path
) -> AsyncIterator[tuple[Client, URL, Path]]:
    """The chart with its page behind TLS; the client, the page's address, and the authority of its certificate."""
    certificates = Certificates(folder)
    certificates.create()
    certificate, key = certificates.issue("page", user="page", hosts=[f"IP:{API_ADDRESS}"])
    repository, _, tag = cluster.agent_image.rpartition(":")
    small = {"resources": {"requests": {"cpu": "50m", "memory": "128Mi"}}}
    async with (
        job_in_a_namespace(cluster) as own,
        dev_server(options=("--ip", "0.0.0.0")) as server,
        gateway_front(job.api, own.namespace) as gateway,
        service_front(partial(pages, job.api, own.namespace), 8234, address=API_ADDRESS) as port,
        Release(helm, cluster.kubeconfig, own.namespace) as chart,
    ):
        content = {"tls.crt": certificate.read_text(), "tls.key": key.read_text()}
        secret = {"metadata": {"name": "page-tls"}, "type": "kubernetes.io/tls", "stringData": content}
        await job.api.create(f"/api/v1/namespaces/{own.namespace}/secrets", secret)
        url = URL(f"https://{API_ADDRESS}:{port}")
        await chart.apply(
            {
                "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
                "temporal": {"address": f"{API_ADDRESS}:{server.port}", "taskQueue": TASK_QUEUE},
                "gateway": {"address": gateway, **small},
                "page": {"enabled": True, "url": str(url), "tls": {"secret": "page-tls"}, **small},
                "jobNamespaces": [job.namespace],
                "sitePolicy": yaml.safe_load(SITE_POLICY),
                **small,
            }
        )
        endpoint = Endpoint(address=server.address, task_queue=TASK_QUEUE)
        yield Client(endpoint=endpoint, namespace=job.namespace), url, certificates.authority


async def token_of(job: PodJob, role: str, *, audience: str = AUDIENCE) -> str:
    """A token of a new service account, with one of the cluster's own roles in the job's namespace; empty: none."""
    account = f"a-{secrets.token_hex(3)}"
    accounts = f"/api/v1/namespaces/{job.namespace}/serviceaccounts"
    await job.api.create(accounts, {"metadata": {"name": account}})
    if role:
        group = "rbac.authorization.k8s.io"
        binding = {
            "metadata": {"name": account},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": job.namespace}],
        }
        await job.api.create(f"{RBAC}/namespaces/{job.namespace}/rolebindings", binding)
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": [audience]}}
    answer = await job.api.create(f"{accounts}/{account}/token", request)
    return answer["status"]["token"]


class User:
    """A user in a browser."""

    def __init__(self, session: aiohttp.ClientSession, url: URL) -> None:
        self._session, self._url = session, url

    async def get(self, path: str) -> tuple[int, str]:
        async with self._session.get(self._url / path) as answer:
            return answer.status, await answer.text()

    async def post(self, path: str, form: dict[str, str], *, origin: str = "") -> tuple[int, str]:
        headers = {"Origin": origin or str(self._url.origin())}
        async with self._session.post(self._url / path, data=form, headers=headers) as answer:
            return answer.status, await answer.text()

    async def form(self, path: str) -> dict[str, str]:
        _, page = await self.get(path)
        return dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', page))


@asynccontextmanager
async def user(url: URL, authority: Path, token: str) -> AsyncIterator[User]:
    """A user who signs in with a token; the certificate is verified."""
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=authority))
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=jar) as session:
        visitor = User(session, url)
        await visitor.post("sign-in", {"token": token, "back": ""})
        yield visitor


@pytest.mark.timeout(400)
@pytest.mark.long("cluster-faults")
async def test_service_accounts_see_and_change_jobs_by_their_rights(
    cluster: TestCluster, helm: Path, job: PodJob, tmp_path: Path
) -> None:
    async with installed(cluster, helm, job, tmp_path / "pki") as (client, url, authority):
        spec = job_of(job.namespace, ["sleep", "600"], rendezvous="env", nproc_per_node=1)
        await client.submit(spec)
        name, path = spec["name"], f"jobs/{job.namespace}/{spec['name']}/"

        async def running() -> bool:
            return (await client.status(name)).phase is JobPhase.RUNNING

        await eventually(running)

        # Rights of Kubernetes' own roles, by the chart's aggregated ClusterRoles.
        async with user(url, authority, await token_of(job, "edit")) as editor:

            async def may_change() -> bool:
                return "change/suspend" in (await editor.get(path))[1]

            await eventually(may_change)  # The controller aggregates within seconds.
            assert name in (await editor.get(""))[1]
            form = await editor.form(f"{path}change/suspend")
            assert (await editor.post(f"{path}change/suspend", form, origin="https://evil.example"))[0] == 403
            assert (await client.status(name)).phase is JobPhase.RUNNING
            status, page = await editor.post(f"{path}change/suspend", form)
            assert status == 200, page

            async def suspended() -> bool:
                return (await client.status(name)).phase is JobPhase.SUSPENDED

            await eventually(suspended)

        async with user(url, authority, await token_of(job, "view")) as viewer:

            async def shows_it() -> str:
                status, page = await viewer.get(path)
                assert status == 200
                return page if "SUSPENDED" in page else ""

            page = await eventually(shows_it)
            assert "change/" not in page
            assert "disabled" in page
            status, page = await viewer.get(f"{path}change/resume")
            assert (status, "update trainingjobs.perdure.dev" in page) == (403, True)

        async with user(url, authority, await token_of(job, "")) as stranger:
            assert (await stranger.get(path))[0] == 403
            assert name not in (await stranger.get(""))[1]

        for token in (await token_of(job, "edit", audience="https://kubernetes.default.svc"), "made-up"):
            async with user(url, authority, token) as refused:
                assert (await refused.get(path))[0] == 401
        await client.cancel(name)
        assert (await client.wait(name)).phase is JobPhase.CANCELLED
