"""Tests of notifications, with real jobs, a real server, and a real HTTP server that behaves badly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowHandle

from perdure.activities import webhooks
from perdure.activities.notifications import NotificationActivities
from perdure.contract import (
    JobPhase,
    JobResult,
    Notice,
    NoticeBatch,
    NotificationBody,
    NotifiedJob,
    NotifierJob,
    NotifierReport,
    TargetReport,
)
from perdure.contract.names import NOTIFIER, notifier_workflow_id
from perdure.spec.notifications import Notification, Occasion
from perdure.workflows import notifier
from tests.policy.scenario import START
from tests.support.receiver import Receiver, answers, hangs, receiving
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec, running_fleet, submit
from tests.workflows.jobs import continue_as_new, node, running, status, tasks, until
from tests.workflows.ways import also_replayed, sandboxed_and_replayed

Handle = WorkflowHandle[Any, Any]


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


def to(receiver: Receiver, path: str, **more: Any) -> dict[str, Any]:
    return {"webhook": {"url": receiver.url(path)}, **more}


def notice(number: int, occasion: Occasion = Occasion.INCIDENT) -> Notice:
    return Notice(
        occasion=occasion,
        state="begun",
        number=number,
        time=START,
        phase=JobPhase.RECOVERING,
        title=f"incident {number}",
    )


async def notifying(
    fleet: Fleet, targets: dict[str, Any], *batches: NoticeBatch, patience: timedelta = timedelta(days=1)
) -> Handle:
    """A notifier that was sent these batches."""
    name = f"job-{uuid4().hex[:8]}"
    job = NotifierJob(
        job=NotifiedJob(namespace="default", name=name, uid="0123abcd", backend="local"),
        targets={name: Notification.model_validate(target) for name, target in targets.items()},
        patience=patience,
    )
    handle = await fleet.client.start_workflow(
        NOTIFIER,
        job,
        id=notifier_workflow_id("default", name, "0123abcd"),
        task_queue=fleet.task_queue,
        start_signal="notify",
        start_signal_args=[batches[0]],
        result_type=NotifierReport,
    )
    for batch in batches[1:]:
        await handle.signal("notify", batch)
    return handle


async def report(handle: Handle) -> dict[str, TargetReport]:
    found = await handle.query("report", result_type=NotifierReport)
    return {one.name: one for one in found.targets}


@also_replayed
async def test_a_job_tells_its_incidents_and_its_end_and_its_deliveries_end_with_it(fleet: Fleet, receiver: Receiver):
    targets = {"all": to(receiver, "/all"), "end": to(receiver, "/end", when=["completion"])}
    job = await submit(fleet, job_spec("2", notifications=targets))
    await running(job, nodes=2)
    await (await node(fleet, job, 1)).rank_dies()
    await running(job, nodes=2, generation=2)
    known = await status(job)
    assert known.notifies == ("all", "end")
    for rank in (0, 1):
        await (await node(fleet, job, rank)).finish()
    await job.result()
    deliveries = fleet.client.get_workflow_handle(
        notifier_workflow_id(known.namespace, known.name, known.uid), result_type=NotifierReport
    )
    ended = await deliveries.result()
    assert [(one.name, one.sent, one.waiting, one.dropped) for one in ended.targets] == [
        ("all", 3, 0, 0),
        ("end", 1, 0, 0),
    ]
    bodies = [NotificationBody.model_validate_json(one.content) for one in receiver.accepted("/all")]
    assert [(one.occasion, one.state) for one in bodies] == [
        ("incident", "begun"),
        ("incident", "over"),
        ("completion", None),
    ]
    assert bodies[0].incident is not None
    assert (bodies[0].incident.number, bodies[0].incident.culprit, bodies[0].job.uid) == (1, 1, known.uid)
    assert bodies[1].incident is not None
    assert bodies[1].incident.restored
    assert bodies[2].outcome is not None
    assert bodies[2].outcome.phase is JobPhase.SUCCEEDED
    ids = [one.id for one in receiver.accepted("/all")]
    assert len(set(ids)) == 3
    assert ids == [str(one.id) for one in bodies]
    assert [one.id for one in receiver.accepted("/end")] == ids[2:]


async def test_a_cancellation_that_arrives_while_a_job_hands_its_last_notices_on_changes_nothing(
    temporal_client: Client, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    may_hand_on, hands_on = asyncio.Event(), asyncio.Event()

    class Slow(NotificationActivities):
        @activity.defn(name="notify")
        async def notify(self, job: NotifierJob, batch: NoticeBatch) -> None:
            hands_on.set()
            await may_hand_on.wait()
            await super().notify(job, batch)

    monkeypatch.setattr("tests.workflows.fleet.NotificationActivities", Slow)
    async with running_fleet(temporal_client) as fleet:
        job = await submit(fleet, job_spec("1", notifications={"all": to(receiver, "/all")}))
        await running(job, nodes=1)
        await (await node(fleet, job, 0)).rank_dies()
        await hands_on.wait()
        await running(job, nodes=1, generation=2)
        await (await node(fleet, job, 0)).finish()
        await until(job, lambda known: known.phase is JobPhase.SUCCEEDED)
        before = await tasks(job)
        await job.cancel()
        await tasks_after(job, before)
        may_hand_on.set()
        result = JobResult.model_validate(await job.result())
        assert result.phase is JobPhase.SUCCEEDED
        await receiver.until(lambda: len(receiver.accepted("/all")) == 3)


async def tasks_after(job: Handle, known: list[int]) -> None:
    """Waits until the job has completed a further task."""

    async def more() -> bool:
        return await tasks(job) != known

    await eventually(more)


async def sent(handle: Handle, target: str, count: int) -> TargetReport | None:
    found = (await report(handle))[target]
    return found if found.sent == count else None


async def test_a_webhook_that_hangs_delays_no_other_and_not_the_job(fleet: Fleet, receiver: Receiver):
    receiver.behaviors["/hangs"] = [hangs]
    job = await submit(
        fleet, job_spec("1", notifications={"hangs": to(receiver, "/hangs"), "works": to(receiver, "/works")})
    )
    await running(job, nodes=1)
    await (await node(fleet, job, 0)).finish()
    await job.result()
    await receiver.until(lambda: len(receiver.accepted("/works")) == 1)
    known = await status(job)
    deliveries = fleet.client.get_workflow_handle(notifier_workflow_id(known.namespace, known.name, known.uid))
    found = await report(deliveries)
    assert (found["hangs"].sent, found["hangs"].waiting) == (0, 1)
    await deliveries.terminate()


async def test_a_server_that_fails_for_a_while_gets_it_later_with_the_same_id(fleet: Fleet, receiver: Receiver):
    receiver.behaviors["/"] = [answers(500), answers(503, Retry_After="1"), answers(429, Retry_After="1"), answers(200)]
    deliveries = await notifying(fleet, {"one": to(receiver, "/")}, NoticeBatch(notices=(notice(1),), last=True))
    assert (await deliveries.result()).targets == (TargetReport(name="one", sent=1),)
    assert [one.accepted for one in receiver.requests] == [False, False, False, True]
    assert len({one.id for one in receiver.requests}) == 1
    assert len({one.content for one in receiver.requests}) == 1


async def test_what_fails_for_its_whole_patience_is_given_up_and_said(fleet: Fleet, receiver: Receiver):
    receiver.behaviors["/"] = [answers(500)]
    batch = NoticeBatch(notices=(notice(1), notice(2)), last=True)
    deliveries = await notifying(fleet, {"one": to(receiver, "/")}, batch, patience=timedelta(seconds=2))
    [ended] = (await deliveries.result()).targets
    assert (ended.sent, ended.given_up, ended.waiting) == (0, 2, 0)
    assert "500" in ended.last_error
    assert {one.body["number"] for one in receiver.requests} == {1, 2}


async def test_a_redirect_is_given_up_at_once(fleet: Fleet, receiver: Receiver):
    receiver.behaviors["/"] = [answers(302, Location=receiver.url("/inner"))]
    batch = NoticeBatch(notices=(notice(1),), last=True)
    deliveries = await notifying(fleet, {"one": to(receiver, "/")}, batch)
    [ended] = (await deliveries.result()).targets
    assert (ended.given_up, len(receiver.requests)) == (1, 1)
    assert "redirects are not followed" in ended.last_error


async def test_a_notification_that_is_being_delivered_when_a_run_ends_is_delivered_by_the_next_one(
    fleet_of_short_runs: Fleet, receiver: Receiver
):
    receiver.behaviors["/fails"] = [answers(500)]
    targets = {"fails": to(receiver, "/fails"), "works": to(receiver, "/works")}
    first_run = await notifying(fleet_of_short_runs, targets, NoticeBatch(notices=(notice(1),)))
    deliveries = fleet_of_short_runs.client.get_workflow_handle(first_run.id, result_type=NotifierReport)
    await receiver.until(lambda: {one.path for one in receiver.requests} == {"/fails", "/works"})
    await continue_as_new(deliveries, lambda: deliveries.signal("notify", NoticeBatch()))
    receiver.behaviors["/fails"] = [answers(200)]
    await deliveries.signal("notify", NoticeBatch(notices=(notice(2),), last=True))
    assert (await deliveries.result()).targets == (
        TargetReport(name="fails", sent=2),
        TargetReport(name="works", sent=2),
    )
    assert [one.body["number"] for one in receiver.accepted("/fails")] == [1, 2]


@sandboxed_and_replayed
async def test_repeats_of_a_notice_are_delivered_once(fleet: Fleet, receiver: Receiver):
    batch = NoticeBatch(notices=(notice(1), notice(2)))
    last = NoticeBatch(notices=(notice(2), notice(3)), last=True)
    deliveries = await notifying(fleet, {"one": to(receiver, "/")}, batch, batch, last)
    await deliveries.result()
    assert [one.body["number"] for one in receiver.accepted("/")] == [1, 2, 3]


async def test_what_is_too_much_is_dropped_oldest_first_and_the_next_message_says_so(
    fleet: Fleet, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(webhooks, "TIMEOUT", timedelta(seconds=3))
    receiver.behaviors["/"] = [hangs, answers(200)]
    many = tuple(notice(number) for number in range(1, notifier.MOST_WAITING + 11))
    deliveries = await notifying(fleet, {"one": to(receiver, "/")}, NoticeBatch(notices=many[:1]))
    await receiver.until(lambda: len(receiver.requests) == 1)
    await deliveries.signal("notify", NoticeBatch(notices=many[1:], lost=2))
    assert (await report(deliveries))["one"].waiting == notifier.MOST_WAITING
    await receiver.until(lambda: len(receiver.accepted("/")) == notifier.BURST)
    delivered = receiver.accepted("/")
    assert [one.body["number"] for one in delivered] == [1, *range(12, 12 + notifier.BURST - 1)]
    assert [one.body["dropped"] for one in delivered[:3]] == [0, 12, 0]
    found = await eventually(lambda: sent(deliveries, "one", notifier.BURST))
    assert (found.dropped, found.waiting) == (12, notifier.MOST_WAITING - notifier.BURST)
    await deliveries.terminate()


async def test_slack_gets_a_text_without_markup(fleet: Fleet, receiver: Receiver):
    target = {"webhook": {"url": receiver.url("/"), "format": "slack"}}
    odd = notice(1).replace(title="<!channel> & <https://evil.example|click>")
    deliveries = await notifying(fleet, {"slack": target}, NoticeBatch(notices=(odd,), last=True))
    await deliveries.result()
    [sent] = receiver.requests
    assert list(json.loads(sent.content)) == ["text"]
    assert sent.body["text"].endswith(": &lt;!channel&gt; &amp; &lt;https://evil.example|click&gt;")
