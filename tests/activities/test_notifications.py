"""Tests of what a worker does for notifications, and refuses to do: commands, and secrets of others."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from perdure.activities.notifications import MOST_OF_A_NAMESPACE, SECRETS_VARIABLE, NotificationActivities
from perdure.activities.site import NO_COMMANDS, SiteActivities
from perdure.activities.webhooks import signature
from perdure.contract import (
    JobPhase,
    Notice,
    NotificationAttempt,
    NotificationBody,
    NotifiedJob,
    SiteFacts,
)
from perdure.spec.notifications import Notification, Occasion
from tests.policy.scenario import START
from tests.support.receiver import Receiver, hangs, receiving

LOOPBACK = ("127.0.0.0/8",)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


def attempt(namespace: str = "nlp", **target: Any) -> NotificationAttempt:
    job = NotifiedJob(namespace=namespace, name="llama", uid="0123abcd", backend="kubernetes")
    notice = Notice(
        occasion=Occasion.INCIDENT, state="begun", number=1, time=START, phase=JobPhase.RECOVERING, title="incident 1"
    )
    body = NotificationBody.of(job, notice)
    return NotificationAttempt(target="one", notification=Notification.model_validate(target), body=body)


def site(client: Client, folder: Path) -> NotificationActivities:
    """A worker that serves several users."""
    variables = {SECRETS_VARIABLE: str(folder)}
    return NotificationActivities(client, own_machine=False, networks=LOOPBACK, variables=variables)


def secret(folder: Path, reference: str, value: str) -> None:
    path = folder / reference
    path.parent.mkdir(parents=True)
    path.write_text(value)
    path.chmod(0o444)


async def deliver(activities: NotificationActivities, given: NotificationAttempt) -> None:
    await ActivityEnvironment().run(activities.deliver, given)


async def test_a_worker_of_several_users_runs_no_command(temporal_client: Client, tmp_path: Path):
    file = tmp_path / "ran"
    command = attempt(command=[sys.executable, "-c", f"open({str(file)!r}, 'w')"])
    with pytest.raises(ApplicationError, match="run no commands") as refused:
        await deliver(site(temporal_client, tmp_path), command)
    assert refused.value.non_retryable
    assert not file.exists()
    await deliver(NotificationActivities(temporal_client, own_machine=True), command)
    assert file.exists()


@pytest.mark.parametrize(("backends", "problem"), [(("kubernetes",), NO_COMMANDS), (("local", "joined"), "")])
async def test_a_job_with_a_command_fails_at_its_start_where_none_is_run(backends: tuple[str, ...], problem: str):
    activities = SiteActivities(SiteFacts(search_attributes=False, backends=backends))
    spec = {
        "name": "llama",
        "namespace": "nlp",
        "notifications": {"me": {"command": ["notify-send"]}},
        "roles": {"worker": {"nodes": 1, "command": ["true"]}},
    }
    environment = ActivityEnvironment()
    environment.info = environment.default_info().__class__(
        **dict[str, Any](vars(environment.default_info()), workflow_id="job/nlp/llama")
    )
    check = await environment.run(activities.check_job, spec)
    assert check.problem == (f"notifications.me.command: {problem}" if problem else "")


async def test_a_token_and_a_key_are_sent_as_documented(temporal_client: Client, receiver: Receiver, tmp_path: Path):
    secret(tmp_path, "nlp/pager/token", "t0ken\n")
    secret(tmp_path, "nlp/signing/key", "k3y")
    webhook = {"url": receiver.url("/"), "token": "pager/token", "signing_key": "signing/key"}
    await deliver(site(temporal_client, tmp_path), attempt(webhook=webhook))
    [sent] = receiver.requests
    assert sent.headers["Authorization"] == "Bearer t0ken"
    timestamp = int(sent.headers["webhook-timestamp"])
    assert sent.headers["webhook-signature"] == signature("k3y", id=sent.id, timestamp=timestamp, body=sent.content)
    assert sent.id == sent.body["id"]
    assert sent.body["version"] == 1


@pytest.mark.parametrize("reference", ["pager/token", "nlp.pager/token", "../nlp/pager/token", "../../nlp/pager/token"])
async def test_a_job_uses_no_secret_of_another_namespace(
    temporal_client: Client, receiver: Receiver, tmp_path: Path, reference: str
):
    secret(tmp_path, "nlp/pager/token", "t0ken")
    given = attempt(namespace="vision", webhook={"url": receiver.url("/")})
    webhook = given.notification.webhook
    assert webhook is not None
    # As a message that no specification's check has seen.
    forged = given.notification.model_copy(update={"webhook": webhook.model_copy(update={"token": reference})})
    with pytest.raises(ApplicationError) as refused:
        await deliver(site(temporal_client, tmp_path), given.replace(notification=forged))
    assert not refused.value.non_retryable, "it may be stored later"
    assert "t0ken" not in str(refused.value)
    assert not receiver.requests


@pytest.mark.parametrize("namespace", ["..", "nlp/..", "../nlp", ""])
async def test_a_forged_namespace_leads_to_no_secret(
    temporal_client: Client, receiver: Receiver, tmp_path: Path, namespace: str
):
    secret(tmp_path / "notifications", "nlp/pager/token", "t0ken")
    secret(tmp_path, "worker/temporal/key", "k3y")
    given = attempt(namespace=namespace, webhook={"url": receiver.url("/"), "token": "temporal/key"})
    with pytest.raises(ApplicationError):
        await deliver(site(temporal_client, tmp_path / "notifications"), given)
    assert not receiver.requests


async def test_servers_that_never_answer_leave_the_worker_to_others(
    temporal_client: Client, receiver: Receiver, tmp_path: Path
):
    receiver.behaviors["/hangs"] = [hangs]
    activities = site(temporal_client, tmp_path)
    endless = attempt(webhook={"url": receiver.url("/hangs")})
    hanging = [asyncio.create_task(deliver(activities, endless)) for _ in range(MOST_OF_A_NAMESPACE)]
    await receiver.until(lambda: len(receiver.requests) == MOST_OF_A_NAMESPACE)
    with pytest.raises(ApplicationError, match="too many notifications") as refused:
        await deliver(activities, endless)
    assert not refused.value.non_retryable
    await deliver(activities, attempt(namespace="vision", webhook={"url": receiver.url("/")}))
    for one in hanging:
        one.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    await deliver(activities, attempt(webhook={"url": receiver.url("/")}))


async def test_a_site_without_secrets_for_notifications_says_so(
    temporal_client: Client, receiver: Receiver, tmp_path: Path
):
    activities = NotificationActivities(temporal_client, own_machine=False, networks=LOOPBACK, variables={})
    with pytest.raises(ApplicationError, match=SECRETS_VARIABLE):
        await deliver(activities, attempt(webhook={"url": receiver.url("/"), "token": "pager/token"}))


async def test_a_site_reaches_its_own_addresses_only_where_its_policy_says_so(
    temporal_client: Client, receiver: Receiver
):
    activities = NotificationActivities(temporal_client, own_machine=False, variables={})
    with pytest.raises(ApplicationError, match="inside the site") as refused:
        await deliver(activities, attempt(webhook={"url": receiver.url("/")}))
    assert refused.value.non_retryable
    assert not receiver.requests
