"""The gateway's own service, for machines that join: a place for a ticket, its departure, and the job's result.

Agents of machines then use the calls in `calls.py`, as those of pods do. A machine proves itself by a token that it
made: the job knows its digest as the machine's session, and the grant names it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from pydantic import SecretBytes, ValidationError
from temporalio.client import Client as TemporalClient

from perdure.activities.nodes.configurations import agent_grant
from perdure.base.credentials.grants import Grant
from perdure.base.credentials.names import JOIN, LEAVE, RESULT, TICKET_HEADER
from perdure.base.credentials.tickets import digest_of
from perdure.base.errors import ControlPlaneOverloaded, ControlPlaneUnreachable, JobNotFound, JoinRefused, PerdureError
from perdure.client.client import Client
from perdure.client.joining import DirectJobConnection
from perdure.contract import (
    DepartureCall,
    Incarnation,
    JobResult,
    JoinRefusal,
    Message,
    NodeRequest,
    PlaceAnswer,
    PlaceCall,
    ResultAnswer,
    ResultCall,
    Ticket,
)
from perdure.contract.names import job_workflow_id, uid_of
from perdure.gateway.callers import Callers, Unauthenticated, Unavailable, bearer_of
from perdure.gateway.calls import Denied
from perdure.gateway.limits import JOIN_BYTES, MACHINES, Limits, TooMany
from perdure.gateway.memberships import Memberships

logger = logging.getLogger(__name__)

METHODS: Final = (JOIN, LEAVE, RESULT)
_PATIENCE_SECONDS: Final = 25.0
"""The time for which a call waits for a job that is ending."""

_HOST_LENGTH: Final = 253
"""The longest name of a host; the job keeps it."""

_Call = TypeVar("_Call", bound=Message)


class Machines:
    """Serves machines that join.

    Invariants: a ticket gives places of its own job only; a grant is made for the machine only that the job has given
    the place; a machine reports its own departure only.
    """

    def __init__(
        self, temporal: TemporalClient, callers: Callers, memberships: Memberships, keys: Sequence[SecretBytes]
    ) -> None:
        """Creates the service.

        Args:
            temporal: Connected to the namespace of the jobs.
            callers: Verifies grants.
            memberships: Verifies tickets.
            keys: Sign the grants.
        """
        self._client = Client(temporal=temporal)
        self._temporal = temporal
        self._callers = callers
        self._memberships = memberships
        self._keys = keys
        self._limits = Limits(MACHINES)

    async def serve(
        self,
        method: str,
        content: bytes,
        headers: Mapping[str, str],
        *,
        address: str,
        proven: Callable[[str], None],
    ) -> Message:
        """Answers one call.

        Args:
            method: One of `METHODS`.
            content: The request, in JSON.
            headers: Of the call.
            address: Where the caller connects from.
            proven: Called with the name under which the caller is counted, once its proofs are verified.

        Raises:
            Unauthenticated: if the proofs are missing or wrong.
            Denied: if the request is not one that the caller may make.
            TooMany: if there are too many calls.
            Unavailable: if the job cannot be asked.
        """
        try:
            match method:
                case "Join":
                    return await self._join(_read(PlaceCall, content), headers, address, proven)
                case "Leave":
                    return await self._leave(_read(DepartureCall, content), headers, proven)
                case _:
                    return await self._result(_read(ResultCall, content), headers, address, proven)
        except ControlPlaneOverloaded as error:
            raise TooMany("the job has too much to do now") from error
        except ControlPlaneUnreachable as error:
            # Without the server's address, which machines need not know.
            raise Unavailable("the job does not answer now") from error
        except JobNotFound as error:
            raise Unauthenticated("there is no such job any more") from error
        except PerdureError as error:
            raise Denied(str(error)) from error

    async def _join(
        self, call: PlaceCall, headers: Mapping[str, str], address: str, proven: Callable[[str], None]
    ) -> PlaceAnswer:
        session = digest_of(bearer_of(headers))
        ticket = await self._ticket(call.namespace, call.job, headers, address)
        host = call.request.host[:_HOST_LENGTH]
        request = call.request.model_copy(update={"session": session, "ticket": ticket.id, "host": host})
        proven(share := _share_of(ticket, request.node_id))
        with self._limits.one_call(share):
            try:
                answer = await self._connection(call.namespace, call.job).request_place(request)
            except JoinRefused as refused:
                if refused.kind not in set(JoinRefusal):
                    raise
                # The job's own text only: the machine prefixes its name itself.
                return PlaceAnswer(
                    refusal=JoinRefusal(refused.kind), reason=str(refused).removeprefix(f"{call.job} refuses: ")
                )
        if isinstance(answer, JobResult):
            return PlaceAnswer(result=answer)
        grant = self._grant(answer.node, session) if answer.node else None
        return PlaceAnswer(
            answer=answer,
            grant=grant.sign(self._keys) if grant else "",
            temporal_namespace=self._temporal.namespace,
        )

    def _grant(self, node: NodeRequest, session: str) -> Grant:
        place = node.node
        logger.info(
            "%s has the place %s/%s-%d/%d",
            *(node.job_id, place.uid, place.role, place.rank, place.incarnation),
            extra={"job": node.job_id.removeprefix("job/"), "node": f"{place.role}-{place.rank}/{place.incarnation}"},
        )
        return agent_grant(node, temporal_namespace=self._temporal.namespace, machine=session)

    async def _leave(self, call: DepartureCall, headers: Mapping[str, str], proven: Callable[[str], None]) -> Message:
        grant = self._machine(headers)
        proven(grant.machine)
        namespace, name = _names_of(grant)
        with self._limits.one_call(grant.machine):
            await self._connection(namespace, name).report_gone(
                grant.group_id,
                Incarnation(rank=grant.rank, incarnation=grant.incarnation),
                time=call.time,
                reason=call.reason,
                cause=call.cause,
            )
        return Message()

    async def _result(
        self, call: ResultCall, headers: Mapping[str, str], address: str, proven: Callable[[str], None]
    ) -> ResultAnswer:
        connection = self._connection(call.namespace, call.job)
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                if not call.first_run_id:
                    ticket = await self._ticket(call.namespace, call.job, headers, address)
                    proven(share := _share_of(ticket, bearer_of(headers)))
                    with self._limits.one_call(share):
                        return ResultAnswer(result=await connection.wait())
                grant = self._machine(headers)
                proven(grant.machine)
                if (call.namespace, call.job) != _names_of(grant) or uid_of(call.first_run_id) != grant.uid:
                    raise Denied("job: the grant is for another one")
                with self._limits.one_call(grant.machine):
                    return ResultAnswer(result=await connection.result_of_run(call.first_run_id))
        except TimeoutError:
            return ResultAnswer(ending=True)

    async def _ticket(self, namespace: str, job: str, headers: Mapping[str, str], address: str) -> Ticket:
        secret = headers.get(TICKET_HEADER, "")
        if not secret:
            raise Unauthenticated(f"no ticket in {TICKET_HEADER}")
        return await self._memberships.ticket(job_workflow_id(namespace, job), secret, address=address)

    def _machine(self, headers: Mapping[str, str]) -> Grant:
        """Returns the grant of a machine, which may have lost its place."""
        grant = self._callers.grant(headers)
        if not hmac.compare_digest(grant.machine, digest_of(bearer_of(headers))):
            raise Unauthenticated("grant and token are of different machines")
        return grant

    def _connection(self, namespace: str, job: str) -> DirectJobConnection:
        return DirectJobConnection(self._client, job, namespace)


def _read(call: type[_Call], content: bytes) -> _Call:
    if len(content) > JOIN_BYTES:
        raise Denied(f"the request has {len(content)} bytes; the most are {JOIN_BYTES}")
    try:
        return call.model_validate_json(content)
    except ValidationError as error:
        problem = error.errors()[0]
        raise Denied(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from error


def _share_of(ticket: Ticket, machine: str) -> str:
    """Returns the name under which a machine's calls are counted: the holder of a ticket cannot make more calls by
    naming more machines than it admits."""
    return f"{ticket.digest}/{zlib.crc32(machine.encode()) % ticket.nodes}"


def _names_of(grant: Grant) -> tuple[str, str]:
    """Returns the namespace and the name of a grant's job."""
    _, namespace, name = grant.job_id.split("/", 2)
    return namespace, name
