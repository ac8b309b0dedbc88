"""A real gateway before a real Temporal server. Only the API server, which knows whose a token is, is played."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import grpc
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import DescribeWorkflowExecutionRequest
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.service import TLSConfig

from perdure.agent.config import GatewayConnection
from perdure.base.credentials.grants import Grant, PodName
from perdure.base.credentials.keyring import Keyring
from perdure.base.credentials.names import GATEWAY_NAME, GRANT_HEADER, TOKEN_HEADER
from perdure.base.encryption.codec import PayloadEncryption
from perdure.gateway.callers import Callers, Unauthenticated, Unavailable
from perdure.gateway.calls import SERVICE
from perdure.gateway.certificates import ServerCertificates, SiteCertificate
from perdure.gateway.connections import BOUNDS, INTERVAL
from perdure.gateway.metrics import GatewayMetrics
from perdure.gateway.server import Gateway
from tests.agent.harness import RunningAgent, Workflows
from tests.support.temporal_server import DevServer, free_port
from tests.support.waiting import DEADLINE


class PlayedReviewer:
    """Knows the pods of the tokens that it was told."""

    def __init__(self) -> None:
        self.pods: dict[str, PodName] = {}
        self.reviews: list[str] = []
        self.away = False
        self.silent = False

    async def pod_of(self, token: str) -> PodName:
        self.reviews.append(token)
        if self.silent:
            await asyncio.Event().wait()
        if self.away:
            raise Unavailable("the API server is away")
        if token not in self.pods:
            raise Unauthenticated("the service account token is not valid")
        return self.pods[token]


class GatewaySite:
    """A gateway that can be stopped and started again at the same address."""

    def __init__(self, server: DevServer, encryption: PayloadEncryption | None = None) -> None:
        self.server = server
        self.encryption = encryption
        self.keyring = Keyring.new()
        self.reviewer = PlayedReviewer()
        self.address = f"127.0.0.1:{free_port()}"
        self.listen = ""
        """The address that the gateway is given; empty: the same."""
        self.certificate: SiteCertificate | None = None
        self.bounds = BOUNDS
        self.interval = INTERVAL
        self._gateway: Gateway | None = None

    async def start(self) -> None:
        keys = self.keyring.signing_keys
        callers = Callers(keys, self.reviewer)
        self._gateway = Gateway(
            await self.server.client(),
            callers,
            keys,
            encryption=self.encryption,
            bounds=self.bounds,
            interval=self.interval,
        )
        await self._gateway.start(
            self.listen or self.address, ServerCertificates(self.keyring.authority, self.certificate)
        )

    @property
    def metrics(self) -> GatewayMetrics:
        """Those of the gateway that runs."""
        assert self._gateway
        return self._gateway.metrics

    async def stop(self, grace: timedelta = timedelta()) -> None:
        if self._gateway:
            await self._gateway.stop(grace)
            self._gateway = None

    def grant(self, workflows: Workflows, *, uid: str = "", rank: int = 0, incarnation: int = 1) -> Grant:
        """The grant of a node of the recording job."""
        uid = uid or secrets.token_hex(4)
        return Grant(
            temporal_namespace=self.server.namespace,
            job_id=workflows.job.id,
            group_id=workflows.group.id,
            task_queue=f"node/{uid}/worker-{rank}/{incarnation}",
            uid=uid,
            role="worker",
            rank=rank,
            incarnation=incarnation,
            pod=PodName(namespace="tests", name=f"pod-{uid}-{rank}-{incarnation}"),
        )

    def token(self, grant: Grant) -> str:
        """A valid token of the pod of a grant."""
        assert grant.pod
        token = secrets.token_hex(16)
        self.reviewer.pods[token] = grant.pod
        return token

    async def client(self, grant: Grant, token: str, *, lazy: bool = True) -> Client:
        """A client of Temporal's SDK, as an agent or an attacker has it."""
        return await Client.connect(
            self.address,
            namespace=self.server.namespace,
            data_converter=pydantic_data_converter,
            tls=TLSConfig(server_root_ca_cert=self.keyring.authority.certificate.encode(), domain=GATEWAY_NAME),
            api_key=token,
            rpc_metadata={GRANT_HEADER: grant.sign(self.keyring.signing_keys)},
            lazy=lazy,
        )

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        """A bare channel, for calls that the SDK would not make, or would repeat."""
        trust = grpc.ssl_channel_credentials(self.keyring.authority.certificate.encode())
        options = [("grpc.ssl_target_name_override", GATEWAY_NAME)]
        async with grpc.aio.secure_channel(self.address, trust, options=options) as channel:
            yield channel

    async def describe(self, workflow: str, *headers: tuple[str, str]) -> tuple[grpc.StatusCode, str]:
        """Asks for a job with these headers; returns status and reason."""
        request = DescribeWorkflowExecutionRequest(
            namespace=self.server.namespace, execution=WorkflowExecution(workflow_id=workflow)
        )
        async with self.channel() as channel:
            call: Callable[..., Awaitable[bytes]] = channel.unary_unary(f"/{SERVICE}/DescribeWorkflowExecution")
            try:
                await call(request.SerializeToString(), metadata=headers, timeout=DEADLINE)
            except grpc.aio.AioRpcError as error:
                return error.code(), error.details() or ""
        return grpc.StatusCode.OK, ""

    def headers(self, grant: Grant, token: str = "") -> tuple[tuple[str, str], ...]:
        """The proofs of an agent."""
        signed = grant.sign(self.keyring.signing_keys)
        return (GRANT_HEADER, signed), (TOKEN_HEADER, f"Bearer {token or self.token(grant)}")

    def agent(self, workflows: Workflows, folder: Path) -> RunningAgent:
        """An agent process, not started yet, that connects to the gateway."""
        agent = RunningAgent(self.server, workflows, folder)
        grant = self.grant(workflows, uid=agent.node.uid)
        token_path = folder / "token"
        token_path.write_text(self.token(grant))
        connection = GatewayConnection(
            address=self.address,
            authority=self.keyring.authority.certificate,
            namespace=self.server.namespace,
            grant=grant.sign(self.keyring.signing_keys),
            token_path=token_path,
        )
        agent.config = agent.config.model_copy(update={"gateway": connection})
        return agent


@asynccontextmanager
async def gateway_site(server: DevServer, encryption: PayloadEncryption | None = None) -> AsyncIterator[GatewaySite]:
    site = GatewaySite(server, encryption)
    await site.start()
    try:
        yield site
    finally:
        await site.stop()
