"""Tests of real ranks that hang: the others wait for them over gloo, and torch's timeout ends those that wait."""

from __future__ import annotations

import os
import signal

from perdure.cli.explain import explanation
from tests.system.site import Site
from workflows.messages import FailureClass, JobPhase

TIMEOUT = "4"
"""Seconds that a collective waits: longer than a busy machine delays a step."""


async def test_the_node_that_others_waited_for_is_suspected_and_the_hanging_rank_is_restarted(site: Site):
    job = await site.submit("--timeout", TIMEOUT, nodes="3")
    await job.stepping(generation=1, ranks=3)
    rank = next(step.pid for step in reversed(job.steps()) if step.rank == 1)
    os.kill(rank, signal.SIGSTOP)
    await job.until(lambda s: s.phase is JobPhase.RUNNING and s.generation >= 2)
    await job.stepping(generation=2, ranks=3)
    (incident,) = await job.incidents()
    assert incident.failure is FailureClass.COLLECTIVE_TIMEOUT
    assert (incident.culprit, [one.rank for one in incident.suspects]) == (None, [1])
    told = explanation(incident, job=job.name, flag="").plain
    assert "suspected: node 1 (rank 1 reported no timeout of its own)" in told
    assert "low confidence" in told
    assert f"perdure logs {job.name} --node 1" in told
    assert {node.incarnation for node in await site.client.nodes(job.name)} == {1}
