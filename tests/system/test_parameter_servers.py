"""Tests of real TensorFlow with parameter servers, whose parts die one after another; scripts only read TF_CONFIG."""

from __future__ import annotations

import json
import re
import signal
import time
from contextlib import suppress
from typing import Any

import psutil
import pytest

from perdure.client.client import Client
from perdure.contract import JobPhase, JobStatus
from perdure.spec.load import read_documents
from scripts.tensorflow import LOCKS, RELEASES, interpreter
from tests.support.allocation import REPOSITORY
from tests.support.waiting import eventually
from tests.system.site import Job, Site

EXAMPLE = REPOSITORY / "examples" / "10-parameter-servers"
COORDINATOR, ESTIMATOR = EXAMPLE / "train.py", LOCKS / "estimator.py"
ENDLESS = 100_000
WITH_ESTIMATOR, TODAYS = RELEASES

pytestmark = [pytest.mark.long("tensorflow"), pytest.mark.timeout(900)]


class Servers:
    """A job with parameter servers, and what its checkpoints and processes show."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.client: Client = job.client
        self.seconds: dict[str, float] = {}

    def process(self, role: str, rank: int = 0) -> psutil.Process:
        """The process of a node that runs the user's script."""
        mark = f"{self.job.uid}/{role}-{rank}/"
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                environment = process.environ()
                if environment.get("PERDURE_NODE", "").startswith(mark) and "LOCAL_RANK" in environment:
                    return process
        raise AssertionError(f"no process of {role} {rank}")

    def cluster(self, role: str) -> dict[str, list[str]]:
        return json.loads(self.process(role).environ()["TF_CONFIG"])["cluster"]

    def saved(self) -> int:
        """The number of the newest checkpoint."""
        with suppress(OSError):
            if found := re.search(r'model_checkpoint_path: ".*ckpt-(\d+)"', (self.job.out / "checkpoint").read_text()):
                return int(found[1])
        return 0

    async def saving(self, count: int = 2) -> None:
        """Some more checkpoints are made."""
        first = self.saved()
        await eventually(lambda: self.saved() >= first + count, what=lambda: f"checkpoints, the last is {self.saved()}")

    async def generations(self) -> dict[str, int]:
        return {role.name: role.generation for role in (await self.job.status()).by_role}

    async def dies(self, role: str, rank: int = 0, *, restarted: tuple[str, ...] = ()) -> None:
        """A process is killed: it comes back, these roles restart, no other does, and the training continues."""
        before = await self.generations()
        died = time.monotonic()
        self.process(role, rank).send_signal(signal.SIGKILL)
        expected = {name: known + (name in (role, *restarted)) for name, known in before.items()}

        def repaired(status: JobStatus) -> bool:
            return all(one.phase is JobPhase.RUNNING and one.generation >= expected[one.name] for one in status.by_role)

        await self.job.until(repaired)
        await self.saving(1)
        self.seconds[role] = time.monotonic() - died
        await self.saving()
        assert await self.generations() == expected

    async def is_scaled(self, role: str) -> None:
        """A third node is added: the chief starts again and learns its address, and nothing else does."""
        before = await self.generations()
        expected = {name: known + (name in (role, "chief")) for name, known in before.items()}
        await self.client.scale(self.job.name, 3, role=role)
        await self.job.until(
            lambda status: all(
                one.phase is JobPhase.RUNNING and one.generation == expected[one.name] for one in status.by_role
            )
        )
        await self.saving()
        assert len(self.cluster("chief")[role]) == 3
        assert await self.generations() == expected


async def submitted(site: Site, release: str, command: list[str], *, epochs: int = ENDLESS, **roles: Any) -> Servers:
    """Starts the job of the example, with the interpreter of a release."""
    out = site.folder / "out"
    out.mkdir()
    (document,) = read_documents(EXAMPLE / "job.yaml")
    given: dict[str, Any] = document.data["roles"]
    given["worker"]["command"] = [str(interpreter(release)), *command]
    spec = {key: value for key, value in document.data.items() if key not in ("name", "roles")}
    spec["env"] = {"OUT": str(out), "EPOCHS": str(epochs), "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONDONTWRITEBYTECODE": "1"}
    return Servers(await site.submit(out=out, roles=given | roles, **spec))


@pytest.mark.parametrize("release", RELEASES)
async def test_each_part_of_a_coordinator_s_cluster_dies_and_only_what_must_starts_again(site: Site, release: str):
    servers = await submitted(site, release, [str(COORDINATOR)])
    await servers.saving(3)
    cluster = servers.cluster("chief")
    assert {name: len(addresses) for name, addresses in cluster.items()} == {"chief": 1, "worker": 2, "ps": 2}
    await servers.dies("worker", 1)
    await servers.dies("ps", restarted=("chief",))
    await servers.dies("evaluator")
    await servers.dies("chief")
    assert servers.cluster("chief") == cluster
    print(f"{release}: seconds to the next checkpoint: {servers.seconds}")


async def test_workers_and_parameter_servers_are_added_while_a_coordinator_trains(site: Site):
    servers = await submitted(site, TODAYS, [str(COORDINATOR)])
    await servers.saving(3)
    await servers.is_scaled("ps")
    await servers.is_scaled("worker")


async def test_the_example_trains_to_its_end(site: Site):
    servers = await submitted(site, TODAYS, [str(COORDINATOR)], epochs=5)
    result = await servers.client.wait(servers.job.name)
    assert (result.phase, result.restarts) == (JobPhase.SUCCEEDED, 0)
    assert servers.saved() == 5
    await servers.job.ended()


async def test_an_estimator_trains_to_its_end_though_each_part_dies(site: Site):
    servers = await submitted(site, WITH_ESTIMATOR, [str(ESTIMATOR), str(site.folder / "out"), "2500"])
    await servers.saving(1)
    await servers.dies("worker")
    await servers.dies("ps", 1, restarted=("chief",))
    await servers.dies("evaluator")
    print(f"estimator: seconds to the next checkpoint: {servers.seconds}")
    result = await servers.client.wait(servers.job.name)
    assert result.phase is JobPhase.SUCCEEDED
    assert servers.saved() >= 2500
