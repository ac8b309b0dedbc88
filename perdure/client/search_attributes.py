"""Search attributes by which jobs are found, and their registration.

They are optional: a job runs without them, but setting one that does not exist blocks its workflow until it does. So a
process that sets them checks first, and adds those that are removed while it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import timedelta

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.client import Client as TemporalClient
from temporalio.service import RPCError, RPCStatusCode

from perdure.workflows.search_attributes import (
    JOB_BACKEND,
    JOB_NAMESPACE,
    JOB_OWNER,
    JOB_PHASE,
    JOB_RESTARTS,
    WORLD_SIZE,
)

SEARCH_ATTRIBUTES = {
    JOB_PHASE.name: "Keyword",
    JOB_BACKEND.name: "Keyword",
    JOB_NAMESPACE.name: "Keyword",
    JOB_OWNER.name: "Keyword",
    WORLD_SIZE.name: "Int",
    JOB_RESTARTS.name: "Int",
}
"""Names and kinds, as Temporal's command line takes them."""

_KINDS = {
    "Keyword": IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
    "Int": IndexedValueType.INDEXED_VALUE_TYPE_INT,
}


_KNOWN_WITHIN = timedelta(minutes=1)
"""How long servers may take to know attributes that were added: each of them reads its namespaces again every 10 s."""
_LOOK_AGAIN = timedelta(seconds=1)
_ASK_AGAIN = timedelta(minutes=1)


async def missing_search_attributes(client: TemporalClient) -> dict[str, str]:
    """The attributes that the client's namespace lacks, or has with another type.

    Raises:
        RPCError: if the server does not answer.
    """
    answer = await client.operator_service.list_search_attributes(
        ListSearchAttributesRequest(namespace=client.namespace)
    )
    return {
        name: kind for name, kind in SEARCH_ATTRIBUTES.items() if answer.custom_attributes.get(name) != _KINDS[kind]
    }


async def register_search_attributes(client: TemporalClient) -> str:
    """Adds the missing attributes, if that is permitted, and waits until the server accepts them.

    Returns:
        Why attributes are still missing; empty if none are.
    """
    try:
        missing = await missing_search_attributes(client)
        if missing:
            request = AddSearchAttributesRequest(namespace=client.namespace)
            request.search_attributes.update({name: _KINDS[kind] for name, kind in missing.items()})
            await client.operator_service.add_search_attributes(request)
            missing = await missing_search_attributes(client)
            if not missing:
                await _await_use(client)
        return f"still missing after they were added: {', '.join(missing)}" if missing else ""
    except RPCError as error:
        return f"{error.status.name}: {error.message}"


async def follow_search_attributes(client: TemporalClient, *, there: bool) -> AsyncGenerator[bool]:
    """Adds attributes that are missing, if that is permitted, for as long as it runs: an administrator may add them
    while a worker runs, or remove one that open jobs set.

    Args:
        client: A client of the namespace.
        there: Whether all attributes are there now.

    Yields:
        Whether they are, after each change.
    """
    while True:
        await asyncio.sleep(_ASK_AGAIN.total_seconds())
        try:
            missing = await missing_search_attributes(client)
        except RPCError:
            # The server is away, or does not tell: nothing is known to have changed.
            continue
        found = not missing or not await register_search_attributes(client)
        if found is not there:
            yield (there := found)


async def _await_use(client: TemporalClient) -> None:
    """Waits until the server knows attributes that were just added. A job that set one before would fail its task, and
    wait 10 s for the next try.

    Raises:
        RPCError: if the server does not answer, or does not know them after a minute.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + _KNOWN_WITHIN.total_seconds()
    query = " AND ".join(f"{name} IS NULL" for name in SEARCH_ATTRIBUTES)
    while True:
        try:
            await client.count_workflows(query)
        except RPCError as error:
            if error.status is not RPCStatusCode.INVALID_ARGUMENT or loop.time() > until:
                raise
            await asyncio.sleep(_LOOK_AGAIN.total_seconds())
        else:
            return
