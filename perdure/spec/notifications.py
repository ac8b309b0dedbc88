"""Notifications: whom a job tells about what happens to it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from .base import SecretReference, Section, Text

MOST_TARGETS = 8
"""Targets of one job: each has a sender of its own."""


class Occasion(StrEnum):
    """What a job tells about."""

    INCIDENT = "incident"
    """An interruption: when the job learns of it, and when its world steps again."""
    COMPLETION = "completion"
    """The job's end is decided: it succeeded, failed or was cancelled."""
    STALL = "stall"
    """Ranks that have stepped make no step any more, and when they step again."""
    BUDGET = "budget"
    """Restarts have used up `retry.max_restarts` but for a fifth of it, or for the last."""


class WebhookFormat(StrEnum):
    """The bodies of requests."""

    JSON = "json"
    """Perdure's own, with a schema: see docs/notifications.md."""
    SLACK = "slack"
    """`{"text": …}`, which Slack, Mattermost and others show as a message."""


def _is_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if parts.scheme not in ("https", "http") or not host:
        raise ValueError("expected a URL, such as https://alerts.example/hooks/perdure")
    if parts.username is not None:
        raise ValueError(
            "expected a URL without a user and a password: a token belongs in token, or a URL that is "
            "secret in url_secret"
        )
    return url


WebhookUrl = Annotated[Text, AfterValidator(_is_url)]


class Webhook(Section):
    """A server that is sent a POST request."""

    url: WebhookUrl | None = None
    """Its URL. Redirects are not followed; addresses inside the site only where it allows them: see
    docs/notifications.md."""
    url_secret: SecretReference | None = None
    """The secret that holds the URL, as name/key, where its path is a secret, as Slack's are."""
    format: WebhookFormat = WebhookFormat.JSON
    """The body: `json`, whose schema docs/notifications.md has, or `slack`, `{"text": …}`."""
    token: SecretReference | None = None
    """The secret that is sent as `Authorization: Bearer …`."""
    signing_key: SecretReference | None = None
    """The secret by which bodies are signed, in the header `webhook-signature` of Standard Webhooks."""

    @model_validator(mode="after")
    def _has_one_url(self) -> Webhook:
        if (self.url is None) == (self.url_secret is None):
            raise ValueError("expected one of url and url_secret")
        return self


class Notification(Section):
    """One of those whom a job tells about what happens to it."""

    when: list[Occasion] = Field(default=list(Occasion), min_length=1)
    """What it is told about: `incident`, `completion`, `stall`, `budget`, which is a restart budget that is nearly
    spent."""
    webhook: Webhook | None = None
    """A server that is sent a request."""
    command: list[Text] | None = Field(default=None, min_length=1)
    """A program that is given the same JSON on standard input: on a worker's machine where the worker also runs nodes
    there (backend `local`), and on one of the job's machines where these have joined (backend `joined`)."""

    @model_validator(mode="after")
    def _has_one_way(self) -> Notification:
        if (self.webhook is None) == (self.command is None):
            raise ValueError("expected one of webhook and command")
        return self
