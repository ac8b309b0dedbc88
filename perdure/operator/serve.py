"""The operator as a process: connects to Temporal and to the API server, and serves until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Collection, Sequence

from temporalio.client import Client as TemporalClient

from perdure.base.backoff import Backoff
from perdure.base.errors import ControlPlaneUnreachable
from perdure.base.kubernetes import KubernetesApi
from perdure.base.metrics.endpoint import serving_metrics
from perdure.base.services import Readiness, health_endpoint
from perdure.client.client import Client
from perdure.client.connection import Endpoint, connect, find_endpoint, payload_encryption
from perdure.operator.operator import FIRST_PAUSE, LONGEST_PAUSE, Operator
from perdure.operator.ownership import Ownership
from perdure.operator.reconcile import BACKENDS
from perdure.operator.resource import PLURAL
from perdure.spec.job import Backend

logger = logging.getLogger("perdure.operator")


class TemporalLink(Client):
    """The operator's client, which connects when Temporal answers: objects show meanwhile that it does not."""

    _temporal: TemporalClient | None

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint=endpoint)
        self._tried = asyncio.Event()
        self._failure = ControlPlaneUnreachable(f"the Temporal server at {endpoint.address} has not answered yet")

    @property
    def connected(self) -> bool:
        """Whether it has connected."""
        return self._temporal is not None

    async def connect(self) -> TemporalClient:
        """Returns Temporal's own client; a call while it does not answer fails at once, however many there are.

        Raises:
            ControlPlaneUnreachable: if it did not answer lately.
        """
        await self._tried.wait()
        if self._temporal is None:
            raise ControlPlaneUnreachable(str(self._failure), remedy=self._failure.remedy)
        return self._temporal

    async def keep_connecting(self) -> None:
        """Connects, however often that fails."""
        identity = f"perdure-operator@{socket.gethostname()}:{os.getpid()}"
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while not self.connected:
            try:
                self._temporal = await connect(self.endpoint, identity=identity, part="operator")
                logger.info("connected to Temporal at %s", self.endpoint.address)
            except ControlPlaneUnreachable as error:
                if str(error) != str(self._failure):
                    logger.warning("%s. %s", error, error.remedy)
                self._failure = error
            self._tried.set()
            if not self.connected:
                await asyncio.sleep(backoff.next_pause())

    def report(self) -> str:
        """What keeps it from connecting, for probes and people; empty if nothing does."""
        return "" if self.connected else f"{self._failure}\n"


async def serve(
    *,
    address: str | None,
    namespaces: Sequence[str],
    ownership: Ownership = Ownership.REQUIRE,
    backends: Collection[Backend] = BACKENDS,
    health_port: int | None = None,
    metrics_port: int | None = None,
) -> None:
    """Runs the operator until SIGTERM or SIGINT.

    Args:
        address: The Temporal server; by default as the environment configures it.
        namespaces: The namespaces to serve; empty: all.
        ownership: The treatment of the objects' owners.
        backends: The backends that objects may name.
        health_port: The port that answers `GET /healthz` and `GET /readyz`.
        metrics_port: The port that serves Prometheus metrics.

    Raises:
        ControlPlaneUnreachable: if no Temporal server is configured.
        PayloadKeysError: if the keys that encrypt payloads cannot be used.
    """
    endpoint = find_endpoint(address)
    # Keys that cannot be used end the process now, and a server that does not answer is waited for.
    payload_encryption(endpoint)
    client = TemporalLink(endpoint)
    api = await KubernetesApi.connect(part="perdure-operator")
    operator = Operator(api, client, namespaces=namespaces, ownership=ownership, backends=backends)

    def readiness() -> Readiness:
        coverage = operator.coverage
        return Readiness(client.connected and coverage.ready, f"{client.report()}{coverage.report()}")

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(client.keep_connecting())
            group.create_task(operator.run())

    running = asyncio.create_task(run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    where = f"the namespaces {', '.join(namespaces)}" if namespaces else "all namespaces"
    logger.info("the operator for %s of %s; Temporal at %s, %s", PLURAL, where, endpoint.address, endpoint.namespace)
    try:
        async with health_endpoint(health_port, readiness), serving_metrics(operator.metrics.text, metrics_port):
            with contextlib.suppress(asyncio.CancelledError):
                await running
    finally:
        await api.close()
