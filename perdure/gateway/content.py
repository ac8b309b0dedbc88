"""What agents may write as results, errors and heartbeats of their tasks.

Workflows read these as soon as they come, and cannot leave one out as they do a signal. So what nobody could read goes
no further than the gateway.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pydantic_core import from_json
from temporalio.api.common.v1 import Payload, Payloads
from temporalio.api.failure.v1 import Failure

_NOTHING: Final = b"binary/null"
_JSON: Final = b"json/plain"


def why_unreadable(content: Payloads | Failure) -> str:
    """Why a workflow could not read what an agent has written; empty where it can."""
    for payload in _payloads(content):
        encoding = payload.metadata.get("encoding", b"")
        if encoding == _NOTHING:
            continue
        if encoding != _JSON:
            return f"a payload of the encoding {encoding.decode(errors='replace')[:50]!r}, which agents do not write"
        try:
            from_json(payload.data)
        except ValueError as error:
            return f"a payload that is no JSON: {error}"
    return ""


def _payloads(content: Payloads | Failure) -> Iterator[Payload]:
    if isinstance(content, Payloads):
        yield from content.payloads
        return
    if content.HasField("encoded_attributes"):
        yield content.encoded_attributes
    yield from content.application_failure_info.details.payloads
    yield from content.canceled_failure_info.details.payloads
    yield from content.timeout_failure_info.last_heartbeat_details.payloads
    yield from content.reset_workflow_failure_info.last_heartbeat_details.payloads
    if content.HasField("cause"):
        yield from _payloads(content.cause)
