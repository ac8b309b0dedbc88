"""The activities of notifications: one hands a job's notices on, one delivers a notification to a target."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final

from temporalio import activity
from temporalio.client import Client
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError

from perdure.activities.site import NO_COMMANDS
from perdure.activities.webhooks import AddressPolicy, DeliveryFailed, post, run_command, signature
from perdure.base.errors import SecretUnavailable
from perdure.base.secret_store import SecretStore
from perdure.contract import NoticeBatch, NotificationAttempt, NotificationBody, NotifierJob
from perdure.contract.names import NOTIFIER, notifier_workflow_id
from perdure.spec.job import Backend
from perdure.spec.notifications import Webhook, WebhookFormat
from perdure.workflows import options

SECRETS_VARIABLE: Final = "PERDURE_NOTIFICATION_SECRETS"
"""A folder NAMESPACE/NAME/KEY of secrets for notifications, by the namespace of the job, on workers that serve several
users."""

MOST_AT_ONCE: Final = 200
"""Deliveries at a time. Each occupies one of the worker's slots for activities, which repairs need, for as long as its
server takes to answer."""
MOST_OF_A_NAMESPACE: Final = 50
"""The same of the jobs of one namespace, so that servers which never answer delay no other namespace's."""

_NAMESPACE: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"


class NotificationActivities:
    """Hands on and delivers with the worker's own client, network and secrets."""

    def __init__(
        self,
        client: Client,
        *,
        own_machine: bool,
        networks: Iterable[str] = (),
        variables: Mapping[str, str] = os.environ,
    ) -> None:
        """Creates the object.

        Args:
            client: The worker's client.
            own_machine: The worker's users run code on its machine anyway: it serves the backend `local`.
            networks: Networks inside the site that webhooks may reach: `webhook_networks` of its policy.
            variables: The environment.
        """
        self._client = client
        self._own = own_machine
        self._addresses = AddressPolicy(tuple(ip_network(network) for network in networks), everything=own_machine)
        self._secrets = Path(variables[SECRETS_VARIABLE]) if variables.get(SECRETS_VARIABLE) else None
        self._delivering = Counter[str]()
        """Deliveries in progress, by the namespace of their jobs."""

    @property
    def all(self) -> Sequence[Callable[..., Any]]:
        """The activities to register with the worker."""
        return (self.notify, self.deliver)

    @activity.defn(name="notify")
    async def notify(self, job: NotifierJob, batch: NoticeBatch) -> None:
        """Hands notices to the workflow that delivers those of the job's run, and starts it where it does not run."""
        about = job.job
        await self._client.start_workflow(
            NOTIFIER,
            job,
            id=notifier_workflow_id(about.namespace, about.name, about.uid),
            task_queue=activity.info().task_queue,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            start_signal="notify",
            start_signal_args=[batch],
            static_summary=f"notifications of {about.namespace}/{about.name}",
            rpc_timeout=options.SIGNAL_TIMEOUT,
        )

    @activity.defn(name="deliver_notification")
    async def deliver(self, attempt: NotificationAttempt) -> None:
        """Makes one try to deliver a notification.

        Raises:
            ApplicationError: if it was not delivered; without retries where another try changes nothing.
        """
        namespace = attempt.body.job.namespace
        if self._delivering.total() >= MOST_AT_ONCE or self._delivering[namespace] >= MOST_OF_A_NAMESPACE:
            raise ApplicationError("too many notifications are being delivered at this moment", type="DeliveryFailed")
        self._delivering[namespace] += 1
        try:
            await self._deliver(attempt)
        except (DeliveryFailed, SecretUnavailable) as error:
            failed = error if isinstance(error, DeliveryFailed) else DeliveryFailed(str(error))
            raise ApplicationError(
                str(failed), type="DeliveryFailed", non_retryable=failed.final, next_retry_delay=failed.pause
            ) from None
        finally:
            self._delivering[namespace] -= 1
            if not self._delivering[namespace]:
                del self._delivering[namespace]

    async def _deliver(self, attempt: NotificationAttempt) -> None:
        body, notification = attempt.body, attempt.notification
        if notification.command is not None:
            if not self._own or body.job.backend == Backend.JOINED:
                raise DeliveryFailed(NO_COMMANDS, final=True)
            environment = {**os.environ, "PERDURE_NOTIFICATION_ID": str(body.id)}
            await run_command(notification.command, _json(body), environment=environment)
        elif notification.webhook is not None:
            await self._post(notification.webhook, body)

    async def _post(self, webhook: Webhook, body: NotificationBody) -> None:
        namespace = body.job.namespace
        url = webhook.url or self._secret(webhook.url_secret or "", namespace)
        content = _slack(body) if webhook.format is WebhookFormat.SLACK else _json(body)
        now = int(time.time())
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "perdure",
            "webhook-id": str(body.id),
            "webhook-timestamp": str(now),
        }
        if webhook.token:
            headers["Authorization"] = f"Bearer {self._secret(webhook.token, namespace)}"
        if webhook.signing_key:
            key = self._secret(webhook.signing_key, namespace)
            try:
                headers["webhook-signature"] = signature(key, id=str(body.id), timestamp=now, body=content)
            except ValueError:
                raise DeliveryFailed("signing_key: what follows whsec_ is not base64") from None
        await post(url, content, headers, self._addresses)

    def _secret(self, reference: str, namespace: str) -> str:
        """The value of a secret that the job may use.

        Raises:
            SecretUnavailable: if there is none.
        """
        if self._secrets is not None:
            if not re.fullmatch(_NAMESPACE, namespace):
                raise SecretUnavailable(f"{namespace!r} is no namespace")
            return SecretStore(self._secrets / namespace, mounted=True).read(reference).strip()
        if not self._own:
            raise SecretUnavailable(f"{reference}: this site has no secrets for notifications ({SECRETS_VARIABLE})")
        return SecretStore().read(reference).strip()


def _json(body: NotificationBody) -> bytes:
    return body.model_dump_json().encode()


def _slack(body: NotificationBody) -> bytes:
    """A message; what training has written must not be markup in it, such as a mention of everyone."""
    text = f"{body.text}" + (f" ({body.dropped} notifications before this were dropped)" if body.dropped else "")
    if body.test:
        text = f"[test] {text}"
    return json.dumps({"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}).encode()
