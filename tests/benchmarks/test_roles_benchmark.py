"""Tests of what the benchmark of roles counts as lost, as made twice, and as the cost of a fault."""

from __future__ import annotations

import pytest

from benchmarks.roles.__main__ import measure
from benchmarks.roles.parameter_servers import KIND, SERVER, WORKER, doubled, lost, seconds_of
from benchmarks.roles.records import Case


@pytest.mark.parametrize(
    ("lines", "counts"),
    [
        (["starts after epoch 0", "epoch 1: loss 2", "epoch 2: loss 1"], (0, 0)),
        (["epoch 1: loss 2", "starts after epoch 2 with {}", "epoch 3: loss 1"], (0, 0)),
        (["epoch 1: loss 2", "epoch 2: loss 1", "starts after epoch 1", "epoch 2: loss 1"], (0, 1)),
        (["epoch 1: loss 2", "epoch 4: loss 1"], (2, 0)),
        ([], (0, 0)),
    ],
    ids=["undisturbed", "saved and not printed", "made again", "lost", "none"],
)
def test_epochs_are_lost_that_no_chief_knows_and_doubled_that_were_printed_twice(
    lines: list[str], counts: tuple[int, int]
) -> None:
    assert (lost(lines), doubled(lines)) == counts


def test_the_seconds_of_a_role_are_the_median_of_its_processes_that_worked_again() -> None:
    def case(role: str, seconds: float | None, fault: str = "rank") -> Case:
        return Case(backend="local", kind=KIND, role=role, fault=fault, recovered_s=seconds)

    cases = [case(WORKER, 1.0), case(WORKER, 9.0), case(WORKER, 3.0), case(WORKER, None), case(WORKER, 50.0, "node")]
    assert seconds_of(cases, WORKER) == 3.0
    assert seconds_of(cases, SERVER) is None


async def test_what_is_not_measured_is_shown_as_not_run() -> None:
    figures = await measure(lambda _: None, set(), rounds=1, seconds=0)
    assert {case.problem for case in figures.cases} == {"not run"}
    assert {(case.backend, case.kind) for case in figures.cases} == {
        ("local", "rl"),
        ("local", KIND),
        ("kubernetes", "rl"),
    }
    assert (figures.rl_ettr, figures.ps_worker_s, figures.ps_server_s) == (None, None, None)
