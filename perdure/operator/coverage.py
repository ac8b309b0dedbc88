"""The namespaces that the operator serves, and those that it cannot serve now, with the reason.

Served is a namespace whose changes are seen. While the API server is silent, or shows a certificate of an authority
that the operator does not know, nothing is refused, and no change is seen either: what was read before becomes stale.

An operator serves many teams. The loss of one namespace, of its rights there or of the resource's definition is a state
of that namespace, which probes, metrics and the log report. The others are served meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

from perdure.base.kubernetes_errors import KubernetesError
from perdure.operator.resource import PLURAL

logger = logging.getLogger("perdure.operator")

EVERYWHERE: Final = "*"
"""Stands for all namespaces, which one watch serves."""
STALE: Final = timedelta(minutes=3)
"""Silence of the API server after which a namespace is not served: it tells about every minute that nothing has
changed, and a connection that tells nothing for two and a half is made again."""


class Cause(StrEnum):
    """Why a namespace is not served."""

    NOT_READ = "not_read"
    """The API server has not answered yet."""
    NOT_DEFINED = "not_defined"
    """The resource's definition is not installed."""
    FORBIDDEN = "forbidden"
    """The operator lacks the right to watch the objects, perhaps because the namespace was deleted."""
    SILENT = "silent"
    """The API server has told nothing for some minutes, so what was read is stale."""
    FAILED = "failed"
    """The API server's answer cannot be used."""


_REMEDIES: Final[Mapping[Cause, str]] = {
    Cause.NOT_READ: "",
    Cause.NOT_DEFINED: "Apply deploy/crds/trainingjobs.yaml.",
    Cause.FORBIDDEN: "Grant the rights of docs/kubernetes-resource.md there, or remove the namespace from --namespace.",
    Cause.SILENT: "",
    Cause.FAILED: "",
}


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A namespace that is not served."""

    namespace: str
    cause: Cause
    reason: str
    """What the API server said."""
    since: datetime

    def __str__(self) -> str:
        text = f"{self.namespace}: {self.cause} since {self.since:%Y-%m-%dT%H:%M:%SZ}: {self.reason}"
        return f"{text}. {_REMEDIES[self.cause]}".rstrip()


class Coverage:
    """The namespaces of one operator."""

    def __init__(self, namespaces: Iterable[str], *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """Serves none of the namespaces yet.

        Args:
            namespaces: Those that are to be served.
            clock: Returns the time.
        """
        self._clock = clock
        now = clock()
        reason = "the API server has not answered yet"
        self._gaps: dict[str, Gap | None] = {
            name: Gap(namespace=name, cause=Cause.NOT_READ, reason=reason, since=now) for name in namespaces
        }
        self._heard = dict.fromkeys(self._gaps, now)
        self._errors: dict[str, str] = {}
        """What keeps the API server from answering, by namespace, as long as it does not."""
        self._told_silent: set[str] = set()

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All namespaces that it is meant to serve; `EVERYWHERE` where one watch serves all."""
        return tuple(self._gaps)

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """The namespaces that are not served."""
        return tuple(gap for name in self._gaps if (gap := self._gap_of(name)) is not None)

    @property
    def ready(self) -> bool:
        """Whether an upgrade may replace another operator by this one.

        The API server has answered for each namespace, and at least one is served: a namespace that is gone must not
        hold up an upgrade, and an operator that serves none must not replace one that does.
        """
        gaps = self.gaps
        return len(gaps) < len(self._gaps) and all(gap.cause is not Cause.NOT_READ for gap in gaps)

    def serves(self, namespace: str) -> bool:
        """Whether the namespace is served now."""
        return self._gap_of(namespace) is None

    def gain(self, namespace: str) -> None:
        """Records that the namespace is served."""
        if self._gaps[namespace] is not None or namespace in self._told_silent:
            self._gaps[namespace] = None
            logger.info("serving the %s of %s", PLURAL, namespace)
        self._heard[namespace] = self._clock()
        self._errors.pop(namespace, None)
        self._told_silent.discard(namespace)

    def miss(self, namespace: str, error: Exception) -> None:
        """Records that the API server does not answer now; what is known of the namespace becomes stale."""
        self._errors[namespace] = str(error) or type(error).__name__
        gap = self._gap_of(namespace)
        if gap is not None and gap.cause is Cause.SILENT and namespace not in self._told_silent:
            self._told_silent.add(namespace)
            logger.warning("not serving %s Jobs continue, and changes are read once it answers.", gap)

    def lose(self, namespace: str, error: Exception) -> None:
        """Records that the namespace is not served, because of an error."""
        cause, reason = _cause_of(error), str(error) or type(error).__name__
        before = self._gaps[namespace]
        same = before is not None and before.cause is cause
        since = before.since if before is not None and same else datetime.now(UTC)
        gap = Gap(namespace=namespace, cause=cause, reason=reason, since=since)
        self._gaps[namespace] = gap
        if not same:
            logger.warning("not serving %s Jobs continue, and the namespace is tried again.", gap)

    def report(self) -> str:
        """The state as text, for probes and people."""
        gaps = self.gaps
        served = [name for name in self._gaps if self.serves(name)]
        lines = [f"serving {', '.join(served) or 'nothing'}", *(f"not serving {gap}" for gap in gaps)]
        return "".join(f"{line}\n" for line in lines)

    def _gap_of(self, namespace: str) -> Gap | None:
        known, heard, error = self._gaps[namespace], self._heard[namespace], self._errors.get(namespace)
        if known is not None:
            return replace(known, reason=error) if error and known.cause is Cause.NOT_READ else known
        if self._clock() - heard < STALE:
            return None
        reason = error or "the API server tells nothing"
        return Gap(namespace=namespace, cause=Cause.SILENT, reason=reason, since=heard)


def _cause_of(error: Exception) -> Cause:
    if isinstance(error, KubernetesError):
        if error.status == 404:
            return Cause.NOT_DEFINED
        if error.unauthorized:
            return Cause.FORBIDDEN
    return Cause.FAILED
