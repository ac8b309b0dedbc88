"""Tests that notifications survive the worker's death, on real processes."""

from __future__ import annotations

import pytest

from perdure.contract import JobPhase
from perdure.contract.names import notifier_workflow_id
from tests.support.receiver import answers, hangs, receiving
from tests.system.site import PATIENCE, Site


@pytest.mark.long("survival")
async def test_a_worker_that_dies_between_event_and_delivery_loses_none_and_it_arrives_once_by_its_id(own_site: Site):
    async with receiving() as receiver:
        receiver.behaviors["/"] = [hangs, answers(200)]
        job = await own_site.submit(
            command=["true"], nodes="1", notifications={"one": {"webhook": {"url": receiver.url("/")}}}
        )
        await receiver.until(lambda: len(receiver.requests) == 1, within=PATIENCE)
        own_site.control_plane.kill_worker()
        await own_site.start()
        assert (await own_site.client.wait(job.name)).phase is JobPhase.SUCCEEDED
        await receiver.until(lambda: bool(receiver.accepted("/")), within=PATIENCE)
        deliveries = (await own_site.client.connect()).get_workflow_handle(
            notifier_workflow_id("default", job.name, job.uid)
        )
        await deliveries.result()
        assert len({one.id for one in receiver.requests}) == 1
        assert len(receiver.accepted("/")) == 1
        assert receiver.requests[-1].body["occasion"] == "completion"
        status = await own_site.client.status(job.name)
        [report] = (await own_site.client.notifications(status)).targets
        assert (report.sent, report.waiting, report.given_up) == (1, 0, 0)
