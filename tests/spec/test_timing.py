from __future__ import annotations

from datetime import timedelta

import pytest

from perdure.spec.timing import LeaseTiming, Timing


@pytest.mark.parametrize(
    ("nodes", "heartbeat", "timeout", "taken_within", "command_taken_within"),
    [
        (1, 2, 6, 4, 4),
        (133, 2, 6, 4, 4),
        (200, 2, 6, 6, 6),
        (201, 2.01, 34.02, 6.03, 6.03),
        (500, 5, 40, 15, 15),
        (1000, 10, 50, 30, 30),
    ],
)
def test_leases_cost_a_thousand_nodes_no_more_than_two_hundred(
    nodes: int, heartbeat: float, timeout: float, taken_within: float, command_taken_within: float
):
    timing = Timing().of(nodes)
    lease = timing.lease
    durations = (lease.heartbeat, lease.timeout, lease.schedule_to_start, timing.commands.schedule_to_start)
    assert durations == tuple(
        timedelta(seconds=seconds) for seconds in (heartbeat, timeout, taken_within, command_taken_within)
    )


def test_what_a_job_asks_for_beyond_that_holds():
    lease = LeaseTiming(heartbeat=timedelta(seconds=20), timeout=timedelta(minutes=2))
    of_many = lease.of(1000)
    assert (of_many.heartbeat, of_many.timeout) == (lease.heartbeat, lease.timeout)
