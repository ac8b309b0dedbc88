"""Tests of a newer release's agents with an older worker: their reports count, though some of their values are
unknown."""

from __future__ import annotations

from perdure.contract import FailureClass
from tests.workflows.fleet import Fleet, job_spec, submit
from tests.workflows.jobs import incidents, node, running
from tests.workflows.played_node import now


async def test_a_failure_of_an_unknown_kind_is_repaired(fleet: Fleet):
    job = await submit(fleet, job_spec("2"))
    await running(job, nodes=2)
    reporter = await node(fleet, job, 1)
    failure = {
        "sender": reporter.request.node.model_dump(mode="json"),
        "sequence": 1,
        "time": now().isoformat(),
        "generation": 1,
        "kind": "A_KIND_OF_THE_NEXT_RELEASE",
        "message": "rank 1 did what only the next release knows",
        "progress": {"step": 7, "source": "A_SOURCE_OF_THE_NEXT_RELEASE"},
    }
    await job.signal("failure", failure)
    await reporter.ready(after=1)
    await running(job, nodes=2, generation=2)
    (incident,) = await incidents(job)
    assert (incident.failure, incident.culprit) == (FailureClass.UNKNOWN, 1)
    assert "only the next release knows" in incident.title
