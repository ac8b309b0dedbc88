"""What `perdure plan` answers, of a job whose speed is known with two numbers of nodes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from typer.testing import CliRunner

from perdure.cli.main import app
from perdure.cli.plan import sizes
from perdure.contract import JobPhase, JobStatus, Pace, Progress, ScalingView


def view(*, global_batch: bool) -> ScalingView:
    paces = (Pace(nodes=2, step=2.0, spread=0.1, generation=2), Pace(nodes=4, step=1.25, spread=0.1, generation=1))
    return ScalingView(fewest=2, largest=8, global_batch=global_batch, min_efficiency=0.7, paces=paces, chosen=2)


def status(scaling: ScalingView, *, total: int | None = 1000) -> JobStatus:
    return JobStatus(
        name="job",
        namespace="default",
        uid="0123abcd",
        phase=JobPhase.RUNNING,
        role="worker",
        backend="local",
        generation=2,
        nodes=2,
        nodes_min=2,
        nodes_max=2,
        world_size=2,
        restarts=0,
        max_restarts=10,
        restart_window=timedelta(hours=1),
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        progress=Progress(step=100, total_steps=total),
        scaling=scaling,
    )


def test_the_rest_and_its_cost_are_told_for_any_number() -> None:
    known = view(global_batch=True)
    found = {size.nodes: size for size in sizes(known, status(known), also=(16,), price=2.0)}
    assert sorted(found) == [2, 3, 4, 8, 16]
    assert [size.measured for size in found.values()] == [True, False, True, False, False]
    # 3 s are shared by the nodes, and half a second is not.
    assert found[16].step == pytest.approx(3 / 16 + 0.5)
    assert found[16].rest == pytest.approx(900 * (3 / 16 + 0.5))
    assert found[2].cost == pytest.approx(900 * 2.0 / 3600 * 2 * 2.0)
    assert found[8].speedup == pytest.approx(2.0 / (3 / 8 + 0.5))


def test_with_a_batch_for_each_rank_more_nodes_need_fewer_steps() -> None:
    known = view(global_batch=False)
    found = {size.nodes: size for size in sizes(known, status(known), also=(), price=None)}
    assert found[4].rest == pytest.approx(900 / 2 * 1.25)
    assert found[4].cost is None


def test_without_a_number_of_steps_no_rest_is_told() -> None:
    known = view(global_batch=True)
    assert {size.rest for size in sizes(known, status(known, total=None), also=(), price=2.0)} == {None}


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ("nodes=0", "--what-if nodes: got '0'; expected a whole number of at least 1"),
        ("nodes=2.5", "--what-if nodes: got '2.5'; expected a whole number of at least 1"),
        ("price=nan", "--what-if price: got 'nan'; expected a number above 0"),
        ("price", "--what-if price: got ''; expected a number above 0"),
        ("size=3", "--what-if: got 'size=3'; expected nodes= and price= once"),
        ("nodes=2,nodes=3", "--what-if: got 'nodes=3'; expected nodes= and price= once"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(asked: str, problem: str) -> None:
    result = CliRunner().invoke(app, ["plan", "job", "--what-if", asked])
    assert result.exit_code != 0
    assert problem in str(result.exception)
