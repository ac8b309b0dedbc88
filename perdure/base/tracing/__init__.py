"""Traces of OpenTelemetry: one for each incident of a job, and one for each request of a user.

OpenTelemetry's own variables turn them on. Otherwise nothing here imports its packages, calls carry no headers, and
workflows record what they recorded before.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from temporalio.client import Interceptor

    from perdure.base.tracing.provider import Tracing

logger = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class _Process:
    """The tracing of this process, begun when it is first needed."""

    tracing: Tracing | None = None
    begun = False


def is_configured(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether OpenTelemetry's variables ask for traces."""
    off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    exporters = environment.get("OTEL_TRACES_EXPORTER", "otlp").split(",")
    return not off and "otlp" in exporters and any(environment.get(name) for name in _ENDPOINTS)


def tracing_of(part: str) -> Tracing | None:
    """Returns the tracing of this process; None if it is off, or cannot be used, which is logged.

    Args:
        part: The part of Perdure that the process is, such as `worker`.
    """
    if not _Process.begun:
        _Process.begun = True
        _Process.tracing = _begin(part) if is_configured() else None
    return _Process.tracing


def interceptors(part: str) -> list[Interceptor]:
    """Returns what a client of Temporal, and the workers that use it, are given: nothing where tracing is off."""
    tracing = tracing_of(part)
    if tracing is None:
        return []
    from perdure.base.tracing.interceptor import Traces

    return [Traces(tracing)]


def end() -> None:
    """Exports what waits, for two seconds at most: a collector may hang."""
    if _Process.tracing is not None:
        _Process.tracing.end()


def _begin(part: str) -> Tracing | None:
    # The variables may be for other programs of the same shell: commands do not speak of them.
    level = logging.DEBUG if part == "client" else logging.WARNING
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")
    if protocol == "grpc":
        logger.log(level, "there are no traces: OTEL_EXPORTER_OTLP_PROTOCOL: expected http/protobuf, found 'grpc'")
        return None
    try:
        from perdure.base.tracing.provider import Tracing

        return Tracing(part)
    except ModuleNotFoundError as missing:
        logger.log(level, "there are no traces, which need %s: run `pip install 'perdure[otlp]'`", missing.name)
    except Exception as error:
        # Wrong variables, which the packages refuse in ways of their own.
        logger.log(level, "there are no traces: %s: %s", type(error).__name__, error)
    return None
