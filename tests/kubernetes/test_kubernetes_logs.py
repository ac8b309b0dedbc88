"""Tests of reading the logs of running, replaced and ended pods with access to Temporal only."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from perdure.base.errors import LogsUnavailable
from perdure.client.client import Client
from perdure.contract.archive import archive_folder, archived_events
from scripts.cluster.cluster import Cluster
from tests.kubernetes.pods import PodJob, TestCluster, role
from tests.kubernetes.site import perdure, start

CHATTER = """
trap 'echo final line of node $GROUP_RANK; exit 143' TERM
i=0
while :; do i=$((i + 1)); echo "line $i of node $GROUP_RANK"; sleep 0.1 & wait $!; done
"""


@pytest.fixture
def kept() -> Iterator[Path]:
    """The folder for copies of logs, with one path for agents and clients. Agents run as another user, and take mounts
    only beneath `/mnt`."""
    Path("/mnt").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="perdure-kept-", dir="/mnt") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


async def lines(
    client: Client, name: str, *, node: int | None = None, incarnation: int | None = None, tail: int | None = None
) -> list[str]:
    return [line.text async for line in client.logs(name, node=node, incarnation=incarnation, tail=tail)]


@pytest.mark.long("cluster-faults")
async def test_logs_of_living_replaced_and_ended_pods(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, kept: Path
) -> None:
    agent = {"name": "perdure-agent", "volumeMounts": [{"name": "kept", "mountPath": str(kept)}]}
    template = {
        "spec": {"initContainers": [agent], "volumes": [{"name": "kept", "hostPath": {"path": str(kept)}}]},
    }
    worker = role(nodes=2, rendezvous="env", command=["sh", "-c", CHATTER], pod_template=template)
    async with perdure(cluster, job.namespace) as (_, client):
        limits, outputs = (
            {"termination_grace_period": "5s"},
            {"logs": f"file://{kept}", "archive": f"file://{kept}/all"},
        )
        training = await start(client, worker, kept, limits=limits, outputs=outputs)
        name = training.name
        await training.running(nodes=2)

        # The agents answer, and what is printed later comes, too.
        async with asyncio.timeout(60), aclosing(client.logs(name, node=1, follow=True, tail=2)) as following:
            seen = [await anext(following) for _ in range(20)]
        numbers = [int(line.text.split()[1]) for line in seen]
        assert numbers == list(range(numbers[0], numbers[0] + 20))
        assert {line.node for line in seen} == {1}
        assert len(await lines(client, name, tail=3)) == 6

        # A pod that is deleted writes its final line into the copy, which is there when it has gone.
        [victim] = [pod["metadata"]["name"] for pod in await job.pods() if "-worker-1-" in pod["metadata"]["name"]]
        await job.api.delete(f"{job.pods_path}/{victim}")
        await training.running(nodes=2, after=1)
        replaced = await lines(client, name, node=1, incarnation=1)
        assert replaced[0] == "line 1 of node 1"
        assert replaced[-1] == "final line of node 1"
        times = [line.time async for line in client.logs(name, node=1, incarnation=1)]
        assert all(times), "copies have the times of lines"
        events = Path(archived_events(archive_folder(f"{kept}/all", job.namespace, name, training.uid)))
        told = (events / "worker-1" / "1" / "agent" / "part-000001.jsonl").read_text()
        assert '"name":"exit"' in told, "the agent's last event is in the archive when its pod has gone"
        assert (await lines(client, name, node=1, tail=1))[0].startswith("line ")
        with pytest.raises(LogsUnavailable, match="node 0 has no incarnation 2, its newest is 1"):
            await lines(client, name, node=0, incarnation=2)

        await client.cancel(name)
        await client.wait(name)
        # Of two pods that end together, either may be the last.
        assert sorted(await lines(client, name, tail=1)) == ["final line of node 0", "final line of node 1"]
