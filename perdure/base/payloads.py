"""Reads payloads that the server keeps, and that others have written.

Users start workflows with tools and programs of their own, and an agent that was taken over reports what it likes. Who
looks at many jobs has one error to expect of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

from temporalio.api.common.v1 import Payload
from temporalio.client import Client
from temporalio.exceptions import FailureError

from perdure.base.errors import PerdureError
from perdure.base.executions import Execution, converter_for

_Kind = TypeVar("_Kind")


class UnreadablePayload(PerdureError, ValueError):
    """What others have written cannot be read here: it is malformed, of another type, or its key is missing."""


@overload
async def first_value(client: Client, workflow_id: str, payloads: Sequence[Payload]) -> Any: ...
@overload
async def first_value(client: Client, workflow_id: str, payloads: Sequence[Payload], kind: type[_Kind]) -> _Kind: ...


async def first_value(
    client: Client, workflow_id: str, payloads: Sequence[Payload], kind: type[Any] | None = None
) -> Any:
    """Reads the first of several payloads.

    Args:
        client: A client of the workflow's namespace.
        workflow_id: The workflow to which the payloads belong.
        payloads: The payloads.
        kind: The type of the value; None for any JSON.

    Raises:
        UnreadablePayload: if there is none, or it cannot be read.
    """
    if not payloads:
        raise UnreadablePayload(f"{workflow_id} has no such value")
    try:
        (value,) = await converter_for(client, workflow_id).decode(payloads[:1], None if kind is None else [kind])
    except PerdureError as error:
        raise UnreadablePayload(str(error), remedy=error.remedy) from error
    except (FailureError, LookupError, RuntimeError, ValueError) as error:
        raise UnreadablePayload(f"a value of {workflow_id} cannot be read: {error}") from error
    if kind is not None and not isinstance(value, kind):
        raise UnreadablePayload(f"a value of {workflow_id} is {type(value).__name__} instead of {kind.__name__}")
    return value


async def memo_value(client: Client, execution: Execution, key: str) -> Any:
    """A value of the memo; None where it has none.

    Raises:
        UnreadablePayload: if it cannot be read.
    """
    payload = execution.info.memo.fields.get(key)
    return None if payload is None else await first_value(client, execution.id, [payload])
