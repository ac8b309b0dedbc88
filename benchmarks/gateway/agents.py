"""Simulated nodes whose agents connect to a gateway, each over a connection and with a grant of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process

import psutil
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.service import TLSConfig

from benchmarks.gateway.process import NAMESPACE
from perdure.agent.transport import shared_runtime
from perdure.base.credentials.grants import Grant, PodName
from perdure.base.credentials.keyring import Keyring
from perdure.base.credentials.names import GATEWAY_NAME, GRANT_HEADER
from perdure.contract import NodeRequest
from tests.support.temporal_server import DevServer, free_port
from tests.workflows.fleet import Fleet


class GatewayProcess:
    """A gateway that can be killed and started again at the same address."""

    def __init__(self, server: DevServer) -> None:
        self.keyring = Keyring.new()
        self.address = f"127.0.0.1:{free_port()}"
        self._server = server
        self._process: Process | None = None

    async def start(self) -> None:
        """Returns when it serves."""
        words = ("-m", "benchmarks.gateway.process", self._server.address, self.address)
        self._process = await asyncio.create_subprocess_exec(sys.executable, *words, stdin=PIPE, stdout=PIPE)
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(self.keyring.to_entries()).encode() + b"\n")
        await self._process.stdin.drain()
        assert await self._process.stdout.readline() == b"serving\n"

    async def kill(self) -> None:
        if self._process and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def usage(self) -> tuple[float, float]:
        """Seconds of processor time until now, and resident megabytes."""
        assert self._process
        process = psutil.Process(self._process.pid)
        times = process.cpu_times()
        return times.user + times.system, process.memory_info().rss / 1e6

    async def client(self, grant: Grant) -> Client:
        """The connection of one agent."""
        assert grant.pod
        return await Client.connect(
            self.address,
            namespace=self._server.namespace,
            data_converter=pydantic_data_converter,
            tls=TLSConfig(server_root_ca_cert=self.keyring.authority.certificate.encode(), domain=GATEWAY_NAME),
            api_key=grant.pod.name,
            rpc_metadata={GRANT_HEADER: grant.sign(self.keyring.signing_keys)},
            # As agents do: the SDK would warn about each call while no gateway runs.
            runtime=shared_runtime(),
        )

    def grant(self, *, job_id: str, group_id: str, task_queue: str, rank: int = 0, uid: str = "bench") -> Grant:
        return Grant(
            temporal_namespace=self._server.namespace,
            job_id=job_id,
            group_id=group_id,
            task_queue=task_queue,
            uid=uid,
            role="worker",
            rank=rank,
            incarnation=1,
            pod=PodName(namespace=NAMESPACE, name=f"pod-{uid}-{rank}"),
        )


class GatewayFleet(Fleet):
    """A fleet whose agents connect to the gateway."""

    gateway: GatewayProcess

    async def agent_client(self, request: NodeRequest) -> Client:
        node = request.node
        grant = self.gateway.grant(
            job_id=request.job_id,
            group_id=request.group_id,
            task_queue=request.task_queue,
            rank=node.rank,
            uid=node.uid,
        )
        return await self.gateway.client(grant.model_copy(update={"incarnation": node.incarnation}))

    def leases_granted(self) -> int:
        """Leases that agents have taken, of all runs of the groups."""
        return sum(len(node.lease_epochs) for node in self.nodes.values())

    def renewals(self) -> int:
        """Renewals of leases by all agents."""
        return sum(node.renewals for node in self.nodes.values())
