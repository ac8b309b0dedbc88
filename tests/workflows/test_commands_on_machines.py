"""Tests of the commands of notifications on a machine that has joined, with a real server and a notifier's workflow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowHandle

from perdure.client.client import Client
from perdure.contract import (
    JobPhase,
    NodeCredentials,
    NodeId,
    NodeRequest,
    Notice,
    NoticeBatch,
    NotifiedJob,
    NotifierJob,
    NotifierReport,
    TargetReport,
)
from perdure.contract.names import NOTIFIER, node_task_queue, notifier_workflow_id, uid_of
from perdure.join.commands import MachineCommands
from perdure.spec.job import JobSpec
from perdure.spec.notifications import Notification, Occasion
from perdure.workflows import options
from tests.policy.scenario import START
from tests.support.waiting import DEADLINE, eventually
from tests.workflows.fleet import Fleet


def spec(command: list[str] | None, **more: Any) -> JobSpec:
    targets = {"pager": {"command": command}} if command else {}
    fields = {"name": f"job-{uuid4().hex[:8]}", "backend": "joined", "notifications": targets, **more}
    return JobSpec.model_validate({**fields, "roles": {"worker": {"nodes": 16, "command": ["true"]}}})


class Machine:
    """A machine with a place in a job, and the job's notifier."""

    def __init__(self, fleet: Fleet, job: JobSpec, rank: int = 0) -> None:
        self.fleet = fleet
        self.job = job
        self.first_run = str(uuid4())
        self.uid = uid_of(self.first_run)
        self.rank = rank
        self.client = Client(temporal=fleet.client)
        self.commands = MachineCommands(self.client)

    @property
    def place(self) -> NodeRequest:
        node = NodeId(uid=self.uid, role="worker", rank=self.rank, incarnation=1)
        return NodeRequest(
            node=NodeCredentials(**node.model_dump(), token="t0ken"),
            name="node",
            spec=self.job,
            job_id=f"job/default/{self.job.name}",
            job_first_run_id=self.first_run,
            group_id="group",
            task_queue=node_task_queue(node),
        )

    async def notified(
        self,
        *,
        target: str = "pager",
        last: bool = False,
        test: bool = False,
        after_end: timedelta = timedelta(minutes=5),
    ) -> WorkflowHandle[Any, Any]:
        """Tells the notifier of an incident; its message has a command of its own, which no machine runs."""
        about = NotifiedJob(namespace="default", name=self.job.name, uid=self.uid, backend="joined")
        notice = Notice(
            occasion=Occasion.INCIDENT,
            state="begun",
            number=1,
            time=START,
            phase=JobPhase.RECOVERING,
            title="incident 1",
            test=test,
        )
        forged = Notification.model_validate({"command": ["touch", "forged"]})
        return await self.fleet.client.start_workflow(
            NOTIFIER,
            NotifierJob(job=about, targets={target: forged}, after_end=after_end),
            id=notifier_workflow_id("default", self.job.name, self.uid),
            task_queue=self.fleet.task_queue,
            start_signal="notify",
            start_signal_args=[NoticeBatch(notices=(notice,), last=last)],
            result_type=NotifierReport,
        )

    async def target(self) -> TargetReport:
        """What `perdure status` shows of the target."""
        status = SimpleNamespace(namespace="default", name=self.job.name, uid=self.uid)
        [target] = (await self.client.notifications(status)).targets  # pyrefly: ignore[bad-argument-type]
        return target

    async def shows(self, reason: str) -> bool:
        return reason in (await self.target()).last_error


@asynccontextmanager
async def serving(machine: Machine) -> AsyncIterator[Machine]:
    machine.commands.start(machine.place)
    try:
        yield machine
    finally:
        await machine.commands.stop()


async def only_target(handle: WorkflowHandle[Any, Any]) -> TargetReport:
    [target] = (await handle.result()).targets
    return target


async def test_a_machine_runs_the_command_of_its_own_specification_and_nothing_of_a_message(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    job = spec(["sh", "-c", 'cat > body; echo "$PLACE" > place'], env={"PLACE": "spec"})
    async with serving(Machine(fleet, job)) as machine:
        ended = await only_target(await machine.notified(last=True))
    assert (ended.sent, ended.given_up) == (1, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["body", "place"]
    assert (tmp_path / "place").read_text() == "spec\n"
    assert '"title":"incident 1"' in (tmp_path / "body").read_text()


async def test_a_name_that_the_specification_does_not_have_runs_nothing(fleet: Fleet):
    async with serving(Machine(fleet, spec(["true"]))) as machine:
        ended = await only_target(await machine.notified(target="other", last=True))
    assert (ended.sent, ended.given_up) == (0, 1)
    assert ended.last_error == "the specification has no notifications.other.command"


async def test_a_command_that_fails_is_repeated(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    async with serving(Machine(fleet, spec(["mkdir", "once"]))) as machine:
        (tmp_path / "once").mkdir()
        handle = await machine.notified(last=True)
        await eventually(lambda: machine.shows("mkdir ended with 1"))
        (tmp_path / "once").rmdir()
        ended = await only_target(handle)
    assert (ended.sent, ended.given_up) == (1, 0)


async def test_a_command_that_no_machine_is_left_to_run_is_given_up_after_the_job(fleet: Fleet):
    machine = Machine(fleet, spec(["true"]))
    ended = await only_target(await machine.notified(last=True, after_end=timedelta(seconds=1)))
    assert (ended.sent, ended.given_up) == (0, 1)
    assert ended.last_error == "no machine of the job was left to run it"


async def test_a_command_that_no_machine_takes_is_named_and_runs_once_one_joins(fleet: Fleet):
    machine = Machine(fleet, spec(["true"]))
    handle = await machine.notified()
    await eventually(lambda: machine.shows("no machine of the job has taken it yet"))
    async with serving(machine):
        await machine.commands.finish()
    told = await machine.target()
    assert (told.sent, told.waiting, told.last_error) == (1, 0, "")
    await handle.terminate()


async def test_a_sample_runs_on_no_machine(fleet: Fleet):
    async with serving(Machine(fleet, spec(["true"]))) as machine:
        ended = await only_target(await machine.notified(last=True, test=True))
    assert (ended.sent, ended.given_up) == (0, 1)
    assert "a sample has no job" in ended.last_error


async def test_a_machine_stays_after_the_end_until_the_command_has_run(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    async with serving(Machine(fleet, spec(["mkfifo", "ran"]))) as machine:
        await machine.notified(last=True)
        await machine.commands.finish()
        assert (tmp_path / "ran").exists()
        # Nothing waits any more.
        async with asyncio.timeout(DEADLINE):
            await machine.commands.finish()


@pytest.mark.parametrize(("command", "rank"), [(None, 0), (["true"], options.MACHINES_WITH_COMMANDS)])
async def test_a_machine_without_need_costs_no_poller(
    fleet: Fleet, temporal_client: TemporalClient, command: list[str] | None, rank: int
):
    before = set(asyncio.all_tasks())
    async with serving(Machine(fleet, spec(command), rank)) as machine:
        assert set(asyncio.all_tasks()) == before
        await machine.commands.finish()
