"""Tests of what the history knows of the use of machines: what an image usually needs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from alembic import command
from sqlalchemy import insert, select, text

from perdure.activities.history.answers import answer
from perdure.activities.history.schema import ROLES
from perdure.activities.history.store import HistoryStore, HistoryUnavailable
from perdure.contract import HistoryAnswer, HistoryRequest, JobStatus, Peaks, RoleNeeds
from tests.activities.history.stored import BEGAN, FAILED, RUNNING, incident, record, shape, status

GI = 2**30
HOUR = 3600.0


def used(memory: float, *, hours: float = 2.0, **fields: Any) -> JobStatus:
    known: dict[str, Any] = {"watched": hours * HOUR, "memory": int(memory * GI), "cpu": 6.0, **fields}
    return status(peaks=Peaks.model_validate(known))


def needs(store: HistoryStore, **fields: Any) -> RoleNeeds:
    [found] = answer(store, HistoryRequest(**fields)).needs
    return found


def test_peaks_are_recorded_and_are_what_an_image_needs(store: HistoryStore):
    for number, memory in enumerate((20, 24, 22)):
        began = BEGAN + timedelta(hours=number)
        store.write(record(f"job-{number}", began=began, answers=used(memory, gpu_memory=61 * GI, shm=GI)))
    found = needs(store)
    assert (found.memory, found.cpu, found.gpu_memory, found.shm) == (24 * GI, 6.0, 61 * GI, GI)
    assert (found.measured, found.names) == (3, ("job-2", "job-1", "job-0"))
    [job, *_] = answer(store, HistoryRequest()).jobs
    assert [(use.role, use.nodes, use.peaks and use.peaks.memory) for use in job.use] == [("trainer", 4, 22 * GI)]


def test_an_absurd_peak_among_others_does_not_count(store: HistoryStore):
    for number, memory in enumerate((20, 24, 60_000)):
        store.write(record(f"job-{number}", answers=used(memory, cpu=5_000.0 if memory > 100 else 6.0)))
    found = needs(store)
    assert (found.memory, found.cpu) == (24 * GI, 6.0)


@pytest.mark.parametrize(
    "poison",
    [
        "UPDATE roles SET memory_bytes = 11529215046068469760",
        "UPDATE roles SET memory_bytes = 9223372036854775807, cpu_cores = 9e999, shm_bytes = 9223372036854775807",
        "UPDATE roles SET memory_bytes = -5, cpu_cores = -1, watched_seconds = -1",
        "UPDATE roles SET cpu_cores = 'NaN', memory_bytes = 'lots'",
        "UPDATE jobs SET phase = 'WON'",
        "UPDATE jobs SET labels = '[1]'",
        "UPDATE worlds SET nodes = 2147483647, steps = -1, step_seconds = 9e999",
        "UPDATE incidents SET failure = 'MAGIC', lost_seconds = 9e999",
    ],
)
def test_a_row_that_makes_no_sense_spoils_no_answer(store: HistoryStore, poison: str):
    for run in ("r1", "r2", "bad"):
        answers = used(20 if run != "bad" else 22)
        store.write(record(run=run, answers=answers, incidents=[incident(1, timedelta(minutes=1))]))
    with store.transaction() as connection:
        connection.execute(text(f"{poison} WHERE run = 'bad'"))
    found = needs(store)
    assert found.memory in (20 * GI, 22 * GI)
    assert (found.cpu, found.nodes) == (6.0, 4)
    HistoryAnswer.model_validate_json(answer(store, HistoryRequest(shape=shape())).model_dump_json())


def test_of_two_jobs_the_absurd_one_does_not_count(store: HistoryStore):
    for memory in (60_000, 20):
        store.write(record(answers=used(memory)))
    assert needs(store).memory == 20 * GI


def test_a_job_that_failed_early_says_nothing_of_what_is_needed(store: HistoryStore):
    store.write(record("early", ended=FAILED, answers=used(2, hours=0.1)))
    store.write(record("late", ended=FAILED, answers=used(20)))
    store.write(record("short", answers=used(18, hours=0.2)))
    assert (needs(store).memory, needs(store).measured) == (20 * GI, 2)


def test_another_tenant_s_peaks_are_not_seen(store: HistoryStore, database: str):
    other = HistoryStore(database, tenant="team-b")
    other.write(record("theirs", answers=used(900)))
    store.write(record("ours", answers=used(20)))
    assert (needs(store).memory, needs(other).memory) == (20 * GI, 900 * GI)
    other.close()


def test_jobs_without_peaks_need_what_is_not_known(store: HistoryStore):
    store.write(record("old"))
    found = needs(store)
    assert (found.jobs, found.measured, found.memory, found.names) == (1, 0, None, ())


def test_a_job_that_answers_no_more_keeps_its_peaks(store: HistoryStore):
    store.write(record(run="r1", ended=RUNNING, answers=used(20)))
    store.write(record(run="r1", answers=status()))
    assert needs(store).memory == 20 * GI


def test_peaks_only_grow_however_little_a_later_look_finds(store: HistoryStore):
    store.write(record(run="r1", ended=RUNNING, answers=used(20, cpu=2.0)))
    store.write(record(run="r1", ended=RUNNING, answers=status(), live={"trainer": Peaks(watched=10.0, cpu=6.0)}))
    store.write(record(run="r1", answers=used(12, cpu=None, shm=GI)))
    found = needs(store)
    assert (found.memory, found.cpu, found.shm) == (20 * GI, 6.0, GI)


def test_services_have_what_their_agents_report(store: HistoryStore):
    service = {"name": "trainer", "phase": "RUNNING", "generation": 1, "nodes": 4, "nodes_max": 4, "restarts": 0}
    live = {"trainer": Peaks(watched=2 * HOUR, memory=3 * GI), "unknown": Peaks(memory=GI)}
    store.write(record(answers=status(by_role=[service]), live=live))
    assert needs(store).memory == 3 * GI


def test_tables_of_an_older_release_are_changed_and_keep_what_they_have(database: str):
    store = HistoryStore(database, tenant="team-a")
    with store.transaction() as connection:
        from perdure.activities.history.store import _alembic

        command.upgrade(_alembic(connection), "0001")
        role = {"tenant": "team-a", "run": "r1", "role": "trainer", "image": "acme/llama:1", "command": "x"}
        connection.execute(insert(ROLES), [role])
    with pytest.raises(HistoryUnavailable, match="not those of this release yet"):
        answer(store, HistoryRequest())
    store.prepare()
    with store.transaction() as connection:
        assert [(row.run, row.memory_bytes) for row in connection.execute(select(ROLES))] == [("r1", None)]
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "0002"
    store.write(record("new", run="r2", answers=used(20)))
    assert needs(store).memory == 20 * GI
    store.close()


def test_only_jobs_of_the_image_count(store: HistoryStore):
    store.write(record("ours", answers=used(20)))
    store.write(record("other", like=shape("acme/other:1"), answers=used(500)))
    assert needs(store, image="acme/llama").memory == 20 * GI
