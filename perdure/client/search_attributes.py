"""Search attributes by which jobs are found, and their registration.

They are optional: a job runs without them, but setting one that does not exist would block its workflow forever. So a
process that sets them checks first.
"""

from __future__ import annotations

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.client import Client as TemporalClient
from temporalio.service import RPCError

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
    """Adds the missing attributes, if that is permitted.

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
        return f"still missing after they were added: {', '.join(missing)}" if missing else ""
    except RPCError as error:
        return f"{error.status.name}: {error.message}"
