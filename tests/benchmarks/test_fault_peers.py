"""What is said of the peers in the matrix of faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults import peers
from benchmarks.faults.peers import FAULTS, Followed, PeerName, PeerOutcome
from benchmarks.faults.rows import ROWS


def test_each_fault_is_a_row_of_the_own_matrix() -> None:
    assert {fault.name for fault in FAULTS} <= {row.name for row in ROWS}


def test_steps_are_lost_that_processes_make_again(tmp_path: Path) -> None:
    (tmp_path / "steps-0").write_text("10.0 41 0\n11.0 42 0\n20.0 41 0\n")
    (tmp_path / "steps-1").write_text("10.1 41 0\n20.1 41 0\n21.0 42 0\n")
    followed = Followed(tmp_path)
    assert followed.lost(since=15.0) == 2
    assert followed.lost(since=30.0) is None
    assert followed.made(15.0) == 1


def test_a_rank_is_named_by_a_line_about_a_failure_that_is_new(tmp_path: Path) -> None:
    log = tmp_path / "node-0.log"
    log.write_text("rank 0 failed (pid: 4711)\n")
    known = {log: log.stat().st_size}
    with log.open("a") as more:
        more.write("started (pid: 4711)\nerror at 10:47:4711\nfailed (exitcode: 1) (pid: 4712)\n")
    assert peers._named(known, {0: 4711, 1: 4712}) == (1,)


@pytest.mark.parametrize(("acted", "told"), [(None, "not within 120 s"), (7.5, "7.5")])
def test_a_peer_that_does_nothing_is_said_to(acted: float | None, told: str) -> None:
    [column] = [
        list(column.cells)
        for column in peers.table([PeerOutcome(system=PeerName.NVRX, name="x", limit_s=120, acted_s=acted)]).columns
        if column.header == "acts after (s)"
    ]
    assert column == [told]
