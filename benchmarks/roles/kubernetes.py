"""The backend `kubernetes`: the job of `examples/09-reinforcement-learning` on pods of the machine's own cluster."""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from examples.demo.learning import EXAMPLE, REWARD, Learning
from examples.demo.pods import PODS, plane_on_pods
from perdure.activities.nodes.kubernetes.merge import merge
from perdure.base.kubernetes import KubernetesApi
from perdure.client.client import Client
from perdure.local.control_plane import Report
from scripts.cluster.host_programs import with_host_programs
from scripts.cluster.images import BARE_IMAGE
from tests.kubernetes.name_server import POD_TEMPLATE, name_server

from .records import ENDLESS

BACKEND = "kubernetes"
PORT = 6100
WITHIN = 300.0
"""Seconds in which a part works again where a busy machine runs a cluster beside it."""


class LearningOnPods(Learning):
    """One run of the job, each of whose nodes is a pod that has this machine's Python and torch."""

    within = WITHIN

    def __init__(self, client: Client, api: KubernetesApi, out: Path, *, steps: int, name: str) -> None:
        super().__init__(client, out, steps=steps, name=name)
        self._api = api

    def place(self, job: dict[str, Any]) -> None:
        """Gives each role an image, and the folders of the machine."""
        job["backend"] = BACKEND
        job["limits"] = {"termination_grace_period": "2s"}
        for role, fields in job["roles"].items():
            *start, script = fields["command"]
            fields["command"] = [*start, str(EXAMPLE / script)]
            fields["image"] = BARE_IMAGE
            fields["pod_template"] = merge(with_host_programs(self.out), POD_TEMPLATE)
            if "ready" in fields:
                fields["ready"]["port"] = PORT if role == REWARD else PORT + 1

    async def lose_node(self, role: str, node: int) -> None:
        """Deletes the pod without a grace period."""
        for pod in await self._pods(role, node):
            await self._api.delete(f"{PODS}/{pod['metadata']['name']}", grace=0)

    async def reward_address(self) -> tuple[str, int] | None:
        """Returns the address of the newest pod."""
        addresses = [pod["status"].get("podIP") for pod in await self._pods(REWARD, 0)]
        return (addresses[-1], PORT) if addresses and addresses[-1] else None

    async def _pods(self, role: str, node: int) -> list[dict[str, Any]]:
        labels = f"perdure.dev/uid={self.uid},perdure.dev/role={role},perdure.dev/rank={node}"
        found = await self._api.list(PODS, labels=labels)
        return [one for one in found if "deletionTimestamp" not in one["metadata"]]


@asynccontextmanager
async def learning_on_pods(report: Report, name: str) -> AsyncGenerator[Learning]:
    """Provides a job that learns on pods, and ends it. Starts the cluster if it does not run, and then ends it, too."""
    with tempfile.TemporaryDirectory(prefix="pk-", ignore_cleanup_errors=True) as path:
        folder = Path(path)
        async with (
            plane_on_pods(folder, report) as (plane, api),
            name_server(api),
            Client(endpoint=await plane.ensure()) as client,
        ):
            unique = f"{name}-{int(time.time()) % 100_000}"
            job = LearningOnPods(client, api, folder / "out", steps=ENDLESS, name=unique)
            try:
                await job.start()
                yield job
            finally:
                await job.end()
