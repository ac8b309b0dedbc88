"""Tests of the history's database: nothing twice, nothing of others, nothing that spoils it; and what it answers."""

from __future__ import annotations

import sqlite3
from datetime import timedelta
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import select, text

from perdure.activities.history.answers import NoSuchJob, answer
from perdure.activities.history.schema import INCIDENTS, JOBS, METADATA, WORLDS
from perdure.activities.history.settings import HistorySettings
from perdure.activities.history.store import HistoryStore, HistoryUnavailable
from perdure.base.errors import Refused
from perdure.base.state_folder import StateFolder
from perdure.contract import FailureClass, HistoryRequest, JobPhase, Progress
from perdure.contract.history import command_shape
from tests.activities.history.stored import BEGAN, FAILED, RUNNING, incident, record, shape, status

MINUTE = timedelta(minutes=1)


def rows(store: HistoryStore) -> dict[str, list[tuple[object, ...]]]:
    with store.transaction() as connection:
        return {
            table.name: sorted(map(tuple, connection.execute(select(table)))) for table in (JOBS, WORLDS, INCIDENTS)
        }


def test_what_is_written_twice_is_there_once(store: HistoryStore) -> None:
    job = record(incidents=[incident(1, 20 * MINUTE)], answers=status(generation=2))
    store.write(job)
    before = rows(store)
    store.write(job)
    assert rows(store) == before
    assert {name: len(found) for name, found in before.items()} == {"jobs": 1, "worlds": 2, "incidents": 1}


def test_a_job_that_changes_has_its_newest_state(store: HistoryStore) -> None:
    store.write(record(run="r1", ended=RUNNING))
    assert answer(store, HistoryRequest()).jobs[0].phase is JobPhase.RUNNING
    store.write(record(run="r1", ended=FAILED, answers=status(reason="it failed", restarts_total=3)))
    [job] = answer(store, HistoryRequest()).jobs
    assert (job.phase, job.reason, job.restarts) == (JobPhase.FAILED, "it failed", 3)


def test_worlds_have_their_nodes_times_and_speed() -> None:
    made = record(
        answers=status(generation=2, nodes=3, progress=Progress(step=5_000, generation=2)),
        incidents=[
            incident(1, 20 * MINUTE, step_before=2_400, restored_step=2_000, nodes_after=3),
            incident(2, 30 * MINUTE, observation={"storage": True}, generation_after=None),
        ],
    )
    first, second = made.worlds
    assert (first["nodes"], first["steps"], first["step_seconds"]) == (4, 2_400, 0.5)
    assert (second["nodes"], second["steps"]) == (3, 3_000)
    assert second["ended_at"] - second["started_at"] == 40 * MINUTE - timedelta(seconds=30)
    assert made.incidents[1]["lost_seconds"] is None


def test_another_tenant_sees_nothing_and_changes_nothing(store: HistoryStore, database: str) -> None:
    store.write(record(run="r1", incidents=[incident(1, MINUTE)]))
    other = HistoryStore(database, tenant="team-b")
    assert answer(other, HistoryRequest()).found == 0
    with pytest.raises(NoSuchJob):
        answer(other, HistoryRequest(like="llama"))
    other.write(record("stolen", run="r1"))
    assert other.recorded(["r1"]) == {"r1"}
    assert other.forget_before(BEGAN + timedelta(days=30)) == 1
    assert [job.name for job in answer(store, HistoryRequest()).jobs] == ["llama"]
    other.close()


def test_absurd_values_are_bounded(store: HistoryStore) -> None:
    bad = record(
        name="x" * 10_000,
        like=shape(image="i" * 10_000, command="\0c\ud800", **{"k" * 10_000: "v" * 10_000}),
        answers=status(
            reason="\0" * 10,
            generation=2**80,
            restarts_total=-5,
            progress=Progress(step=2**80, generation=1),
        ),
        incidents=[incident(2**70, timedelta(days=-5_000), lost=1e12 / 4, title="\ud800" * 5_000, culprit=2**50)],
    )
    store.write(bad)
    store.write(record("good"))
    found = answer(store, HistoryRequest())
    assert {len(job.name) for job in found.jobs} == {400, 4}
    assert all(len(job.model_dump_json()) < 10_000 for job in found.jobs)
    assert max(job.lost_seconds for job in found.jobs) <= timedelta(days=3650).total_seconds()


def test_the_tables_are_those_of_the_migrations(store: HistoryStore) -> None:
    with store.transaction() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []


def test_tables_of_a_newer_release_are_left_alone(store: HistoryStore) -> None:
    with store.transaction() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(HistoryUnavailable, match="newer release"):
        store.prepare()
    with pytest.raises(HistoryUnavailable, match="newer release"):
        answer(store, HistoryRequest())


def test_a_database_without_tables_is_not_changed_by_a_question(database: str) -> None:
    store = HistoryStore(database, tenant="team-a")
    with pytest.raises(HistoryUnavailable, match="not those of this release yet"):
        answer(store, HistoryRequest())


def test_a_locked_database_takes_it_later(store: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.activities.history.store._PATIENCE", 0.1)
    hurried = HistoryStore(f"sqlite:///{tmp_path / 'history.db'}", tenant="team-a")
    holder = sqlite3.connect(tmp_path / "history.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(HistoryUnavailable, match="locked"):
        hurried.write(record())
    holder.rollback()
    hurried.write(record())
    assert answer(store, HistoryRequest()).found == 1
    hurried.close()


def test_a_full_disk_leaves_no_half_of_a_job(store: HistoryStore) -> None:
    with store.transaction() as connection:
        pages = connection.execute(text("PRAGMA page_count")).scalar_one()
        connection.execute(text(f"PRAGMA max_page_count = {pages + 1}"))
    many = [incident(number, number * MINUTE, title="t" * 900) for number in range(1, 40)]
    with pytest.raises(HistoryUnavailable, match="full"):
        store.write(record(incidents=many))
    assert rows(store) == {"jobs": [], "worlds": [], "incidents": []}


def test_jobs_are_kept_for_the_retention(store: HistoryStore) -> None:
    store.write(record("old", incidents=[incident(1, MINUTE)]))
    store.write(record("new", began=BEGAN + timedelta(days=10)))
    store.write(record("open", ended=RUNNING))
    assert store.forget_before(BEGAN + timedelta(days=5)) == 1
    assert {job.name for job in answer(store, HistoryRequest()).jobs} == {"new", "open"}
    assert rows(store)["incidents"] == []


def test_jobs_like_another_are_found_by_image_command_and_labels(store: HistoryStore) -> None:
    store.write(record("same", like=shape(team="nlp")))
    store.write(record("image", like=shape(command="python other.py"), began=BEGAN + MINUTE))
    store.write(record("command", like=shape(image="acme/other:2"), began=BEGAN + 2 * MINUTE))
    store.write(record("neither", like=shape(image="acme/other:2", command="python other.py", team="nlp")))
    found = answer(store, HistoryRequest(shape=shape(team="nlp")))
    assert [(job.name, job.alike) for job in found.jobs] == [("same", 3), ("command", 1), ("image", 1)]
    assert {job.name for job in answer(store, HistoryRequest(like="image")).jobs} == {"image", "same", "neither"}
    with pytest.raises(NoSuchJob, match='no job named "nobody"'):
        answer(store, HistoryRequest(like="nobody"))


def test_an_image_is_named_with_or_without_its_tag(store: HistoryStore) -> None:
    for name, image in (("a", "acme/llama:1"), ("b", "acme/llama@sha256:0"), ("c", "acme/llama-2:1")):
        store.write(record(name, like=shape(image=image)))
    assert {job.name for job in answer(store, HistoryRequest(image="acme/llama")).jobs} == {"a", "b"}
    [needs] = answer(store, HistoryRequest(image="acme/llama:1")).needs
    assert (needs.jobs, needs.succeeded, needs.nodes, needs.seconds) == (1, 1, 4, 3600)


def test_failures_are_counted_by_the_machine_on_which_they_began(store: HistoryStore) -> None:
    requested = incident(3, 30 * MINUTE, failure=None, host="gpu-7")
    store.write(record("a", incidents=[incident(1, MINUTE), incident(2, 10 * MINUTE, failure="NETWORK"), requested]))
    store.write(
        record("b", incidents=[incident(1, MINUTE), incident(2, MINUTE, host="gpu-8"), incident(3, MINUTE, host="")])
    )
    worst, other = answer(store, HistoryRequest()).hosts
    assert (worst.host, worst.failures, worst.jobs, worst.lost_seconds) == ("gpu-7", 3, 2, 90)
    assert worst.classes == {FailureClass.KILLED: 2, FailureClass.NETWORK: 1}
    assert (other.host, other.failures) == ("gpu-8", 1)


def test_only_jobs_since_a_time_and_of_a_namespace(store: HistoryStore) -> None:
    store.write(record("old"))
    store.write(record("new", began=BEGAN + timedelta(days=10)))
    assert [job.name for job in answer(store, HistoryRequest(since=BEGAN + timedelta(days=1))).jobs] == ["new"]
    assert answer(store, HistoryRequest(namespace="nlp")).found == 2
    assert answer(store, HistoryRequest(namespace="vision")).found == 0
    few = answer(store, HistoryRequest(limit=1))
    assert (len(few.jobs), few.found) == (1, 2)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            ["torchrun", "--nnodes=2", "src/train.py", "--lr", "0.1", "--token=s3cret"],
            "torchrun --nnodes train.py --lr --token",
        ),
        (["/usr/bin/python", "-m", "acme.train", "data"], "python -m acme.train"),
        (["bash", "run.sh", "7"], "bash run.sh"),
    ],
)
def test_the_shape_of_a_command_has_no_values(command: list[str], expected: str) -> None:
    assert command_shape(command) == expected


def test_scripts_in_a_command_are_alike_whatever_their_numbers() -> None:
    one, same, other = (command_shape(["bash", "-c", script]) for script in ("train 1", "train 22", "evaluate 1"))
    assert one == same != other


def test_the_environment_says_where_the_history_is_kept(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)

    def settings(**variables: str) -> HistorySettings | None:
        return HistorySettings.from_environment(variables, state)

    default = settings()
    assert default is not None
    assert default.url == f"sqlite:///{tmp_path}/history.db"
    assert settings(PERDURE_HISTORY="off") is None
    chosen = settings(PERDURE_HISTORY="postgres://u:secret@db/perdure", PERDURE_HISTORY_RETENTION="90d")
    assert chosen == HistorySettings(url="postgresql+psycopg://u:secret@db/perdure", retention=timedelta(days=90))
    assert "secret" not in repr(chosen)
    with pytest.raises(ValueError, match="PERDURE_HISTORY_RETENTION"):
        settings(PERDURE_HISTORY_RETENTION="long")
    with pytest.raises(ValueError, match="expected off, or an address"):
        settings(PERDURE_HISTORY="yes")
    with pytest.raises(Refused, match="not in mysql"):
        HistoryStore("mysql://u:secret@db/perdure", tenant="team-a")
