"""Turns Temporal's errors into ones that say what is wrong with which job, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from temporalio.client import WorkflowQueryFailedError
from temporalio.service import RPCError, RPCStatusCode

from perdure.connection import CALL_TIMEOUT, unreachable
from perdure.errors import JobNotFound, NoWorker, PerdureError, Refused

if TYPE_CHECKING:
    from perdure.client import Client


@asynccontextmanager
async def explained(client: Client, name: str = "", namespace: str | None = None) -> AsyncGenerator[None]:
    """Explains the errors of what happens inside.

    Raises:
        JobNotFound: if the server knows no such job.
        NoWorker: if the server answers and no worker does.
        ControlPlaneUnreachable: if the server does not answer.
        Refused: if either says no.
    """
    try:
        yield
    except WorkflowQueryFailedError as error:
        raise Refused(f"{name} cannot answer: {error}") from error
    except RPCError as error:
        raise await _explanation(client, name, namespace or client.namespace, error) from error


async def _explanation(client: Client, name: str, namespace: str, error: RPCError) -> PerdureError:
    text = error.message.lower()
    match error.status:
        case RPCStatusCode.NOT_FOUND if name and "namespace" not in text:
            return await _not_found(client, name, namespace)
        case RPCStatusCode.FAILED_PRECONDITION | RPCStatusCode.DEADLINE_EXCEEDED | RPCStatusCode.CANCELLED:
            if await _answers(client):
                local = client.endpoint.is_local_default
                return NoWorker(
                    f"no worker answers for {name or 'jobs'} at {client.endpoint.address}",
                    remedy="Running nodes train on without one. "
                    f"Start one: perdure worker{' --detach' if local else ''}. See `perdure doctor`.",
                )
            return unreachable(client.endpoint, "no answer in time")
        case RPCStatusCode.UNAVAILABLE | RPCStatusCode.UNKNOWN | RPCStatusCode.INTERNAL:
            return unreachable(client.endpoint, error.message.splitlines()[0] if error.message else str(error.status))
        case _:
            return Refused(f"the Temporal server refuses: {error.message} ({error.status.name})")


async def _answers(client: Client) -> bool:
    """Whether the server itself is there."""
    temporal = await client.connect()
    try:
        return await temporal.service_client.check_health(timeout=CALL_TIMEOUT)
    except RPCError:
        return False


async def _not_found(client: Client, name: str, namespace: str) -> JobNotFound:
    try:
        known = await client.list(everywhere=True)
    except PerdureError:
        known = []
    here = [job.name for job in known if job.namespace == namespace]
    elsewhere = [job.namespace for job in known if job.name == name]
    if elsewhere:
        remedy = f"There is one in another namespace: add -n {elsewhere[0]}."
    elif nearest := difflib.get_close_matches(name, here, n=3, cutoff=0.5):
        remedy = f"Did you mean {' or '.join(nearest)}?"
    else:
        remedy = "`perdure list -A` shows all jobs."
    return JobNotFound(f'no job named "{name}" in the namespace {namespace}', remedy=remedy)
