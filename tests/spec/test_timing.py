from __future__ import annotations

import json
from datetime import timedelta

import pytest
from temporalio.contrib.pydantic import pydantic_data_converter

from perdure.spec.accepted import read_accepted
from perdure.spec.timing import LeaseTiming, Timing
from perdure.spec.validate import parse_spec


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


@pytest.mark.parametrize("name", ["transition_batch", "edge_batch"])
def test_the_name_of_an_earlier_release_is_accepted_and_sent_but_not_shown(name: str):
    data = {"name": "a", "roles": {"worker": {"nodes": 1, "command": ["true"]}}, "timing": {"signals": {name: "1s"}}}
    job = parse_spec(data)
    assert job.timing.signals.transition_batch == timedelta(seconds=1)
    assert "edge_batch" not in job.model_dump()["timing"]["signals"]
    assert read_accepted(job.model_dump(mode="json")) == job
    [sent] = pydantic_data_converter.payload_converter.to_payloads([job])
    assert json.loads(sent.data)["timing"]["signals"]["edge_batch"] == "1s"
