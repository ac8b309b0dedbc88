"""How the processes of the control plane write their logs: lines for people, or a JSON object for each line.

Secrets that can be recognized are replaced in both, as in events: the texts of exceptions often have them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure_training.events.redaction import Redaction

FORMAT_VARIABLE = "PERDURE_LOG_FORMAT"
"""The format of logs: `text` or `json`."""
PLACES = ("job", "node", "rank", "generation", "incident")
"""Where something happened. A log call names them in its `extra`, where they are not known from what runs."""
_LONGEST = 32_768
"""Characters of a message or of an exception. Collectors split longer lines, which are not JSON then."""

Context = Callable[[], Mapping[str, Any]]
"""Returns the places that all lines of a process have now."""


class LogFormat(StrEnum):
    """The format of log lines."""

    TEXT = "text"
    JSON = "json"


def configured_format(environment: Mapping[str, str] = os.environ) -> LogFormat:
    """Returns the format that the environment names; text if it names none, or one that does not exist."""
    return LogFormat.JSON if environment.get(FORMAT_VARIABLE, "").strip().lower() == LogFormat.JSON else LogFormat.TEXT


def formatter_of(format: LogFormat, *, context: Context | None = None) -> logging.Formatter:
    """Returns the formatter of a process's log handlers.

    Args:
        format: The format.
        context: Adds places to each line of JSON; None for those of the Temporal workflow or activity that logs.
    """
    return _JsonLines(context or _temporal_places) if format is LogFormat.JSON else _TextLines()


class _TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._redaction = _redaction()

    def format(self, record: logging.LogRecord) -> str:
        return _readable(super().format(record), self._redaction)


class _JsonLines(logging.Formatter):
    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._redaction = _redaction()

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": _readable(record.getMessage(), self._redaction),
            **self._places(record),
        }
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            line["exception"] = _readable(record.exc_text, self._redaction)
        # Escape sequences of JSON stand for all but ASCII: what reads logs needs no encoding, and sees no terminal's.
        return json.dumps(line, default=str)

    def _places(self, record: logging.LogRecord) -> dict[str, Any]:
        try:
            known = dict(self._context())
        except Exception:
            # A line without its places is better than none.
            known = {}
        known |= {name: value for name in PLACES if (value := getattr(record, name, None)) is not None}
        return known


def _redaction() -> Redaction:
    # Commands import this module and log nothing: what it imports takes a moment.
    from perdure_training.events.redaction import Redaction

    return Redaction()


def _readable(text: str, redaction: Redaction) -> str:
    """The text without secrets, and not longer than a line may be."""
    # Secrets are sought before the text is cut off, which would leave parts of one; in all of 10 MB this takes seconds.
    text = redaction.text(text[: 4 * _LONGEST])
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _temporal_places() -> dict[str, Any]:
    """The job, and the node or group, of the workflow or activity that logs; found only where Temporal's SDK runs."""
    workflow, activity = sys.modules.get("temporalio.workflow"), sys.modules.get("temporalio.activity")
    places = dict[str, Any]()
    if workflow is not None and workflow.in_workflow():
        places = _places_of(workflow.info().workflow_id)
        instance = workflow.instance()
        places |= getattr(instance, "log_places", None) or {}
    elif activity is not None and activity.in_activity():
        places = _places_of(activity.info().workflow_id or "")
    return places


def _places_of(workflow_id: str) -> dict[str, Any]:
    """The places that the ID of a workflow names: `job/<namespace>/<name>`, and its parts."""
    words = workflow_id.split("/")
    if len(words) < 3 or words[0] != "job":
        return {}
    return {"job": f"{words[1]}/{words[2]}"}
