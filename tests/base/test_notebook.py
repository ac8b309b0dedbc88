"""Tests of values that notebooks show."""

from __future__ import annotations

from datetime import UTC, datetime

from perdure import JobPhase, JobResult, JobSummary, Table


def job(name: str, restarts: int | None = None) -> JobSummary:
    return JobSummary(
        name=name, namespace="default", workflow_id="w", run_id="r", restarts=restarts, started_at=datetime.now(UTC)
    )


def test_a_value_is_a_table_of_the_fields_that_say_something() -> None:
    result = JobResult(
        phase=JobPhase.FAILED,
        exit_code=1,
        reason="rank 1: ValueError",
        generations=2,
        restarts=1,
        started_at=datetime(2026, 11, 27, 9, 0, tzinfo=UTC),
        finished_at=datetime(2026, 11, 27, 9, 30, tzinfo=UTC),
    )
    shown = result._repr_html_()
    assert ">FAILED<" in shown
    assert ">2026-11-27 09:30:00 UTC<" in shown
    assert "log_tail" not in shown


def test_what_a_training_says_is_text() -> None:
    shown = job("<script>alert(1)</script>")._repr_html_()
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown


def test_several_values_are_rows_under_their_fields() -> None:
    table = Table([job("a"), job("b", restarts=3)])
    shown = table._repr_html_()
    assert shown.count("<tr>") == 3
    assert "<th>restarts</th>" in shown
    assert [one.name for one in table] == ["a", "b"]


def test_thousands_of_values_are_counted() -> None:
    shown = Table(job(f"job-{n}") for n in range(2_000))._repr_html_()
    assert shown.endswith(" and 1900 more")
    assert "job-99<" in shown
    assert "job-100<" not in shown
