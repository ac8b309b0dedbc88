"""Tests of jobs that leave their resources to jobs of the past, with a real history, and with none."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client
from temporalio.worker import Worker

from perdure.activities.history.activities import HistoryActivities
from perdure.activities.history.store import HistoryStore
from perdure.contract import JobPhase, JobShape, JobStatus, Peaks
from perdure.contract.names import history_task_queue
from perdure.spec.validate import parse_spec
from tests.activities.history.stored import record, status
from tests.support.postgres import PostgresServer
from tests.support.replays import replay
from tests.workflows.fleet import Fleet, job_spec, running_fleet, submit
from tests.workflows.jobs import node, running, until

GI = 2**30


def auto(**role: Any) -> dict[str, Any]:
    fields = {"nodes": "auto", "command": ["torchrun", "train.py"], "resources": "auto", **role}
    return job_spec(roles={"worker": fields}, namespace="nlp")


async def start(fleet: Fleet, spec: dict[str, Any]) -> Any:
    return await fleet.client.start_workflow(
        "TrainingJob", spec, id=f"job/nlp/{spec['name']}", task_queue=fleet.task_queue
    )


def used(spec: dict[str, Any], *, memory: int = 20 * GI, nodes: int = 3) -> Any:
    like = JobShape.of(parse_spec(spec))
    answers: JobStatus = status(
        role="worker", nodes=nodes, peaks=Peaks(watched=7200.0, memory=memory, cpu=6.0), generation=1
    )
    return record("before", like=like, answers=answers)


@asynccontextmanager
async def history(
    client: Client, fleet: Fleet, path: Path, *, server: PostgresServer | None = None
) -> AsyncGenerator[HistoryStore]:
    url = f"sqlite:///{path / 'history.db'}" if server is None else server.url
    store = HistoryStore(url, tenant=client.namespace)
    activities = HistoryActivities(client, store, task_queue=fleet.task_queue, retention=timedelta(days=1))
    queue = history_task_queue(fleet.task_queue)
    async with Worker(client, task_queue=queue, activities=activities.all):
        yield store
    activities.close()
    store.close()


async def test_a_job_takes_what_jobs_like_it_have_used(temporal_client: Client, tmp_path: Path):
    spec = auto()
    async with running_fleet(temporal_client) as fleet, history(temporal_client, fleet, tmp_path) as store:
        store.prepare()
        store.write(used(spec, nodes=2))
        job = await start(fleet, spec)
        known = await running(job, nodes=2)
        assert (known.nodes_min, known.nodes, known.nodes_max) == (2, 2, 2)
        assert known.auto is not None
        assert (known.auto.cpu, known.auto.memory, known.auto.jobs) == ("7", "23Gi", ("before",))
        await replay(await job.fetch_history())
        await job.cancel()


async def test_without_a_history_a_job_starts_with_the_default(temporal_client: Client):
    async with running_fleet(temporal_client) as fleet:
        job = await start(fleet, auto())
        known = await running(job, nodes=1)
        assert known.auto is not None
        assert (known.auto.memory, known.auto.problem) == ("16Gi", "no worker that keeps a history answered")
        await job.cancel()


async def test_a_history_of_an_older_release_keeps_no_job_waiting(temporal_client: Client, tmp_path: Path):
    async with running_fleet(temporal_client) as fleet, history(temporal_client, fleet, tmp_path):
        job = await start(fleet, auto(nodes=1))
        known = await running(job, nodes=1)
        assert known.nodes_max == 1
        assert known.auto is not None
        assert known.auto.problem.startswith("the history cannot be read: ")
        await job.cancel()


@contextmanager
def locked(file: Path) -> Generator[None]:
    with closing(sqlite3.connect(file, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        yield


@contextmanager
def of_a_newer_release(file: Path) -> Generator[None]:
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("UPDATE alembic_version SET version_num = '9999'")
    yield


@contextmanager
def overwritten(file: Path) -> Generator[None]:
    file.write_bytes(b"no database" * 1000)
    yield


@contextmanager
def spoiled(file: Path) -> Generator[None]:
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("UPDATE jobs SET started_at = 'yesterday'")
    yield


@pytest.mark.long("history")
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (locked, "locked"),
        (of_a_newer_release, "of a newer release"),
        (overwritten, "not a database"),
        (spoiled, "holds what it cannot have written"),
    ],
)
async def test_an_elastic_job_starts_and_is_repaired_whatever_has_become_of_its_history(
    temporal_client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Path], AbstractContextManager[None]],
    told: str,
):
    monkeypatch.setattr("perdure.activities.history.store._PATIENCE", 0.1)
    spec = auto(nodes="1:2")
    async with running_fleet(temporal_client) as fleet, history(temporal_client, fleet, tmp_path) as store:
        store.prepare()
        store.write(used(spec))
        with fault(tmp_path / "history.db"):
            job = await start(fleet, spec)
            known = await running(job, nodes=2)
            assert known.auto is not None
            assert known.auto.problem.startswith("the history cannot be read: ")
            assert told in known.auto.problem
            assert known.auto.memory == "16Gi"
            await fleet.lose(await node(fleet, job, 1))
            await until(job, lambda s: s.phase is JobPhase.RUNNING and s.generation > known.generation)
            await job.cancel()


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.end()


@pytest.mark.long("history")
async def test_a_job_starts_though_the_server_of_its_history_stands_still(
    temporal_client: Client, tmp_path: Path, server: PostgresServer
):
    async with (
        running_fleet(temporal_client) as fleet,
        history(temporal_client, fleet, tmp_path, server=server) as store,
    ):
        store.prepare()
        store.write(used(auto()))
        with server.frozen():
            job = await start(fleet, auto(nodes="1:2"))
            known = await running(job, nodes=2, within=120)
            assert known.auto is not None
            assert (known.auto.memory, known.auto.problem) == ("16Gi", "no worker that keeps a history answered")
        again = await start(fleet, auto(nodes="1:2"))
        known = await running(again, nodes=2)
        assert known.auto is not None
        assert (known.auto.memory, known.auto.problem) == ("23Gi", "")
        for one in (job, again):
            await one.cancel()


async def test_jobs_of_another_namespace_or_tenant_are_not_asked(temporal_client: Client, tmp_path: Path):
    spec = auto(nodes=1)
    async with running_fleet(temporal_client) as fleet, history(temporal_client, fleet, tmp_path) as store:
        store.prepare()
        theirs = HistoryStore(f"sqlite:///{tmp_path / 'history.db'}", tenant="another")
        theirs.write(used(spec, memory=900 * GI))
        theirs.close()
        store.write(used(spec))
        other = spec | {"namespace": "default"}
        job = await submit(fleet, other)
        known = await running(job, nodes=1)
        assert known.auto is not None
        assert known.auto.measured == 0
        await job.cancel()
