"""Tests of the history in a real PostgreSQL server, which is killed while jobs are recorded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import func, select, text
from temporalio.client import Client

from perdure.activities.history.activities import HistoryActivities
from perdure.activities.history.answers import answer
from perdure.activities.history.records import JobRecord
from perdure.activities.history.schema import INCIDENTS, JOBS, METADATA, WORLDS
from perdure.activities.history.store import HistoryStore, HistoryUnavailable
from perdure.contract import HistoryRequest
from tests.activities.history.played_jobs import jobs_are_played, start_job
from tests.activities.history.stored import BEGAN, incident, record, shape, status
from tests.support.postgres import PostgresServer
from tests.support.waiting import eventually, wait_for

pytestmark = pytest.mark.long("history")

JOBS_OF_A_WRITER = 150
WRITERS = 4
KILLS = 3


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.end()


@pytest.fixture
def store(server: PostgresServer) -> Iterator[HistoryStore]:
    store = HistoryStore(server.url, tenant="team-a")
    store.prepare()
    yield store
    with store.transaction() as connection:
        METADATA.drop_all(connection)
        connection.execute(text("DROP TABLE alembic_version"))
    store.close()


def test_workers_that_start_together_make_the_tables_once(server: PostgresServer, store: HistoryStore) -> None:
    with store.transaction() as connection:
        METADATA.drop_all(connection)
        connection.execute(text("DROP TABLE alembic_version"))
    stores = [HistoryStore(server.url, tenant=f"team-{number}") for number in range(8)]
    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(HistoryStore.prepare, stores))
    with store.transaction() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    for one in stores:
        one.close()


def test_absurd_values_are_bounded(store: HistoryStore) -> None:
    store.write(
        record(
            name="x\0" * 10_000,
            like=shape(image="\ud800" * 10_000, command="c" * 10_000, **{"k\0": "v\ud800"}),
            answers=status(reason="\0\ud800" * 5_000, generation=2**80),
            incidents=[incident(2**70, timedelta(days=-3_000), culprit=2**50, title="\0" * 10)],
        )
    )
    [job] = answer(store, HistoryRequest()).jobs
    assert len(job.name) == 400


def test_nothing_is_lost_and_nothing_is_twice_though_the_server_is_killed(
    server: PostgresServer, store: HistoryStore
) -> None:
    refused = 0
    done = threading.Semaphore(0)

    def until_written(own: HistoryStore, job: JobRecord) -> None:
        nonlocal refused

        def written() -> bool:
            nonlocal refused
            try:
                own.write(job)
            except HistoryUnavailable:
                refused += 1
                return False
            return True

        wait_for(written)
        done.release()

    def write(writer: int) -> None:
        own = HistoryStore(server.url, tenant="team-a")
        for number in range(JOBS_OF_A_WRITER):
            # Two writers write each job, as two attempts of one activity may.
            run = f"{writer % 2}-{number}"
            incidents = [incident(one, one * timedelta(minutes=1)) for one in range(1, 6)]
            until_written(own, record(run, run=run, answers=status(generation=6), incidents=incidents))
        own.close()

    total = JOBS_OF_A_WRITER * WRITERS
    with ThreadPoolExecutor(WRITERS) as pool:
        writers = [pool.submit(write, number) for number in range(WRITERS)]
        for _ in range(KILLS):
            for _ in range(total // (KILLS + 1)):
                assert done.acquire(timeout=60)
            server.kill()
            server.start()
        for writer in writers:
            writer.result()
    assert refused > 0
    jobs = JOBS_OF_A_WRITER * 2
    with store.transaction() as connection:
        counts = [
            connection.execute(select(func.count()).select_from(table)).scalar() for table in (JOBS, WORLDS, INCIDENTS)
        ]
    assert counts == [jobs, jobs * 6, jobs * 5]
    assert answer(store, HistoryRequest()).found == jobs


async def test_jobs_that_end_while_the_server_is_away_are_recorded_later(
    temporal_client: Client, server: PostgresServer, store: HistoryStore
) -> None:
    async with jobs_are_played(temporal_client) as queue:
        own = HistoryStore(server.url, tenant=temporal_client.namespace)
        activities = HistoryActivities(temporal_client, own, task_queue=queue, retention=timedelta(days=1))
        handles = [await start_job(temporal_client, queue) for _ in range(5)]
        await eventually(lambda: _recorded(activities, own, 5, ended=False))
        server.kill()
        for handle in handles:
            await handle.signal("end", True)
            await handle.result()
        with pytest.raises(HistoryUnavailable):
            await activities.look()
        server.start()
        await eventually(lambda: _recorded(activities, own, 5, ended=True))
        assert answer(store, HistoryRequest()).found == 0
        own.close()


async def test_a_server_that_stands_still_keeps_nothing_else_of_the_worker_waiting(
    temporal_client: Client, server: PostgresServer, store: HistoryStore
) -> None:
    async with jobs_are_played(temporal_client) as queue:
        activities = HistoryActivities(temporal_client, store, task_queue=queue, retention=timedelta(days=1))
        await eventually(lambda: _recorded(activities, store, 0, ended=False))
        with server.frozen():
            questions = [asyncio.create_task(activities.read_history(HistoryRequest())) for _ in range(100)]
            look = asyncio.create_task(activities.look())
            # The worker's threads start and restart nodes.
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "started"), 30) == "started"
            assert not look.done()
        assert {answer.found for answer in await asyncio.gather(*questions)} == {0}
        await look
        activities.close()


def test_a_table_that_another_one_has_locked_is_written_later(server: PostgresServer, store: HistoryStore) -> None:
    other = HistoryStore(server.url, tenant="team-b")
    with other.transaction() as connection:
        connection.execute(text("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE"))
        with pytest.raises(HistoryUnavailable, match="lock timeout"):
            store.write(record())
    store.write(record())
    assert answer(store, HistoryRequest()).found == 1
    other.close()


def test_a_server_whose_disk_is_full_takes_it_later(store: HistoryStore) -> None:
    # The condition that PostgreSQL raises where it cannot extend a file, raised after the first rows of a job.
    no_room = "CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE SQLSTATE '53100'; END $$"
    with store.transaction() as connection:
        connection.execute(text(no_room))
        connection.execute(
            text("CREATE TRIGGER no_room BEFORE INSERT ON incidents FOR EACH ROW EXECUTE FUNCTION no_room()")
        )
    job = record(incidents=[incident(1, timedelta(minutes=1))])
    with pytest.raises(HistoryUnavailable, match="DiskFull"):
        store.write(job)
    assert answer(store, HistoryRequest()).found == 0
    with store.transaction() as connection:
        connection.execute(text("DROP FUNCTION no_room() CASCADE"))
    store.write(job)
    assert answer(store, HistoryRequest()).found == 1


async def _recorded(activities: HistoryActivities, store: HistoryStore, number: int, *, ended: bool) -> bool:
    await activities.look()
    found = answer(store, HistoryRequest()).jobs
    return len([job for job in found if bool(job.finished_at) is ended]) == number


def test_tables_are_given_up_to_the_retention(store: HistoryStore) -> None:
    store.write(record("old", incidents=[incident(1, timedelta(minutes=1))]))
    store.write(record("new", began=BEGAN + timedelta(days=10)))
    assert store.forget_before(BEGAN + timedelta(days=5)) == 1
    assert [job.name for job in answer(store, HistoryRequest()).jobs] == ["new"]
