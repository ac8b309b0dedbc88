"""Errors of the Kubernetes API server, as types whose properties say what an error means to its reader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class KubernetesError(Exception):
    """The API server refused a request."""

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        headers: Mapping[str, str] | None = None,
        *,
        causes: Iterable[str] = (),
        fields: Iterable[str] = (),
    ) -> None:
        super().__init__(f"{message or reason} ({status})")
        self.status = status
        """The HTTP status."""
        self.reason = reason
        """The machine-readable reason, such as `AlreadyExists`."""
        self.message = message
        self.headers = headers or {}
        self.causes = frozenset(causes)
        """Machine-readable details of the reason, such as `NamespaceTerminating` of a `Forbidden`."""
        self.fields = frozenset(fields)
        """Paths of the object's fields that are invalid."""

    @property
    def transient(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status == 429 or self.status >= 500

    @property
    def lacks_version(self) -> bool:
        """Whether the server does not have the version of a collection that is to be watched from: it has forgotten
        it, or was set back to a backup from before it."""
        too_large = "ResourceVersionTooLarge" in self.causes or "Too large resource version" in self.message
        return self.status == 410 or (self.status == 504 and too_large)

    @property
    def invalid(self) -> bool:
        """Whether the object is wrong by itself: no rule, quota or permission of the cluster must change for this
        answer, only the object. Admission policies and webhooks may answer with the same statuses: policies name no
        field, and the server names the webhook first."""
        if self.message.startswith("admission webhook"):
            return False
        return self.status == 400 or (self.status == 422 and bool(self.fields))

    @property
    def denied(self) -> bool:
        """Whether a permission or an admission rule denies the request, which an administrator may change."""
        return self.status in (400, 401, 403, 422) and not self.invalid

    @property
    def quota_exceeded(self) -> bool:
        """Whether a quota refuses the request; it may succeed when another pod ends."""
        return self.status == 403 and "exceeded quota" in self.message

    @property
    def unauthorized(self) -> bool:
        """Whether the caller lacks the right, or seems to: while an API server starts, it also refuses authorized
        callers until it has read the cluster's roles and accounts."""
        admission = self.quota_exceeded or "NamespaceTerminating" in self.causes
        return self.status in (401, 403) and not admission


class Absent(KubernetesError):
    """The object does not exist."""


def error_of(status: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> KubernetesError:
    """Returns the error that a `Status` object of the API server describes."""
    kind = Absent if status.get("code") == 404 else KubernetesError
    details: Mapping[str, Any] = status.get("details") or {}
    causes: list[Mapping[str, str]] = details.get("causes") or []
    return kind(
        int(status.get("code", 500)),
        status.get("reason", ""),
        status.get("message", ""),
        headers,
        causes=[cause.get("reason", "") for cause in causes],
        fields=[cause["field"] for cause in causes if cause.get("field")],
    )
