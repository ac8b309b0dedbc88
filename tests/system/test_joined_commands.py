"""Tests of the commands of notifications on machines that have joined: the machines are simulated, all else is real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perdure.contract import JobPhase
from perdure.contract.names import notifier_workflow_id
from tests.support.command_line import PERDURE
from tests.support.waiting import eventually
from tests.system.joined import Machines
from tests.system.site import PATIENCE, WALK, Job, Site

pytestmark = pytest.mark.long("joining")

# One line for each run: the machine, the ID, the job's variables, and the JSON from standard input.
RECORDS = 'echo "$MACHINE $PERDURE_NOTIFICATION_ID $PLACE $TOKEN $(cat)" >> "$RECORD"'


class Record:
    """What the commands of a test have written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def runs(self) -> list[tuple[list[str], dict[str, Any]]]:
        """The words and the JSON of each run."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        parts = [line.partition(" {") for line in lines]
        return [(words.split(" "), json.loads("{" + body)) for words, _, body in parts]

    async def has(self, count: int) -> list[tuple[list[str], dict[str, Any]]]:
        return await eventually(
            lambda: self.runs if len(self.runs) >= count else None,
            within=PATIENCE,
            what=lambda: f"{count} runs, but {self.runs}",
        )


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path / "record")


async def submitted(site: Site, record: Record, command: str, *, nodes: str, **more: Any) -> Job:
    target = {"command": ["sh", "-c", command], **more}
    return await site.submit(
        script=WALK,
        nodes=nodes,
        backend="joined",
        env={"RECORD": str(record.path), "PLACE": "spec"},
        secrets={"TOKEN": "pager/token"},
        notifications={"pager": target},
    )


def joined(here: Machines, job: Job, *names: str) -> None:
    """Starts machines that have the job's secret."""
    for name in names:
        here.start(*PERDURE, "join", job.name, "--node-id", name, environment={"MACHINE": name})


@pytest.fixture
def token(here: Machines) -> str:
    folder = Path(here.environment["PERDURE_STATE"]) / "secrets" / "pager"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "token").write_text("t0ken")
    (folder / "token").chmod(0o600)
    return "t0ken"


async def delivered(site: Site, job: Job) -> tuple[int, int, int]:
    """What was delivered, waits and was given up, at the end of the deliveries."""
    handle = (await site.client.connect()).get_workflow_handle(notifier_workflow_id("default", job.name, job.uid))
    await handle.result()
    [report] = (await site.client.notifications(await site.client.status(job.name))).targets
    return report.sent, report.waiting, report.given_up


async def test_a_machine_of_the_job_runs_the_command_also_when_the_job_has_ended(
    site: Site, here: Machines, record: Record, token: str
):
    job = await submitted(site, record, RECORDS, nodes="2")
    joined(here, job, "a", "b")
    await job.running(nodes=2)
    job.signal(1, "rank")
    await job.running(nodes=2, after=1)
    await record.has(2)
    job.finish()
    assert (await site.client.wait(job.name)).phase is JobPhase.SUCCEEDED
    assert [await machine.leave() for machine in here.started] == [0, 0]
    runs = await record.has(3)
    assert [(body["occasion"], body["state"]) for _, body in runs] == [
        ("incident", "begun"),
        ("incident", "over"),
        ("completion", None),
    ]
    for (machine, notification, *variables), body in runs:
        assert machine in ("a", "b")
        assert notification == body["id"]
        assert variables == ["spec", token]
    assert await delivered(site, job) == (3, 0, 0)


async def test_another_machine_runs_the_command_when_the_first_dies_with_it(
    site: Site, here: Machines, record: Record, token: str, tmp_path: Path
):
    dies_first = f'mkdir "{tmp_path}/first" && kill -9 $PPID && exit 1; {RECORDS}'
    job = await submitted(site, record, dies_first, nodes="1:2", when=["completion", "stall", "budget"])
    joined(here, job, "a", "b")
    await job.running(nodes=2)
    job.finish()
    ended = await site.client.wait(job.name)
    assert ended.phase is JobPhase.SUCCEEDED
    [((machine, *_), body)] = await record.has(1)
    assert body["occasion"] == "completion"
    codes = {name: await process.leave() for name, process in zip("ab", here.started, strict=True)}
    assert codes == {machine: 0, ({"a", "b"} - {machine}).pop(): -9}
    assert await delivered(site, job) == (1, 0, 0)
