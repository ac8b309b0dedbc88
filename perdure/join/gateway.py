"""A joining machine's connection through the gateway: it reaches neither Temporal nor a worker.

The machine makes a token of its own. The job knows a digest of it as the machine's session, so a place that this
process was given belongs to no other process, although others have the ticket, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Final, TypeVar

import grpc
from pydantic import SecretStr, ValidationError

from perdure.activities.nodes.joined.node_session import AgentConnection
from perdure.agent.config import GatewayRights
from perdure.base.credentials.names import (
    GRANT_HEADER,
    JOIN,
    LEAVE,
    MACHINES_SERVICE,
    RESULT,
    TICKET_HEADER,
    TOKEN_HEADER,
)
from perdure.base.credentials.tickets import digest_of, new_secret
from perdure.base.errors import ControlPlaneOverloaded, ControlPlaneUnreachable, NotPermitted, PerdureError, Refused
from perdure.client.client import OUTAGE_LIMIT
from perdure.client.joining import join_refused
from perdure.contract import (
    DepartureCall,
    JobResult,
    JoinAnswer,
    JoinRequest,
    LossCause,
    Message,
    NodeRequest,
    PlaceAnswer,
    PlaceCall,
    ResultAnswer,
    ResultCall,
)
from perdure.contract.base import Time
from perdure.join.ticket_file import TicketFile
from perdure.spec.job import JobSpec

_TIMEOUT: Final = timedelta(seconds=30)
"""The timeout of a call; the gateway answers within 25 s."""
_PAUSE: Final = 2.0
"""Seconds until the job's result is requested again from a gateway that is away."""
_OPTIONS: Final = (
    # A gateway that is replaced is back in seconds; by default a channel waits up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_http_proxy", 0),
)

_Answer = TypeVar("_Answer", bound=Message)


class GatewayJobConnection:
    """Connects to the gateway with a ticket, and from the first place on with the grant that it was given."""

    def __init__(self, address: str, ticket: TicketFile) -> None:
        """Creates the connection; it connects at the first call.

        Args:
            address: Host and port of the gateway.
            ticket: Of the job.
        """
        self._address = address
        self._ticket = ticket
        self._token = new_secret()
        self.session = digest_of(self._token)
        self._grant = ""
        self._temporal_namespace = ""
        self._channel: grpc.aio.Channel | None = None

    async def start(self, spec: JobSpec) -> bool:
        raise Refused("a machine with a ticket starts no job", remedy="Start it where Temporal is reachable.")

    async def request_place(self, request: JoinRequest) -> JoinAnswer | JobResult:
        ticket = self._ticket
        call = PlaceCall(namespace=ticket.namespace, job=ticket.job, request=request)
        answer = await self._call(JOIN, call, PlaceAnswer)
        if answer.refusal is not None:
            raise join_refused(ticket.job, answer.refusal, answer.reason)
        if answer.result is not None:
            return answer.result
        if answer.grant:
            self._grant, self._temporal_namespace = answer.grant, answer.temporal_namespace
        return answer.answer or JoinAnswer(reason="the gateway gave no reason")

    async def wait(self) -> JobResult:
        return await self._final_result(ResultCall(namespace=self._ticket.namespace, job=self._ticket.job))

    async def result(self, place: NodeRequest) -> JobResult | None:
        call = ResultCall(namespace=self._ticket.namespace, job=self._ticket.job, first_run_id=place.job_first_run_id)
        answer = await self._call(RESULT, call, ResultAnswer)
        return await self._final_result(call) if answer.ending else answer.result

    async def _final_result(self, call: ResultCall) -> JobResult:
        loop = asyncio.get_running_loop()
        answered_at = loop.time()
        while True:
            try:
                answer = await self._call(RESULT, call, ResultAnswer)
            except ControlPlaneUnreachable:
                if loop.time() - answered_at > OUTAGE_LIMIT.total_seconds():
                    raise
                await asyncio.sleep(_PAUSE)
                continue
            answered_at = loop.time()
            if answer.result is not None:
                return answer.result

    async def report_departure(
        self, place: NodeRequest, *, time: Time, reason: str, cause: LossCause = LossCause.UNKNOWN
    ) -> None:
        await self._call(LEAVE, DepartureCall(time=time, reason=reason, cause=cause), Message)

    def agent_connection(self) -> AgentConnection:
        return AgentConnection(
            gateway=GatewayRights(
                address=self._address,
                authority=self._ticket.authority,
                server_name=self._ticket.server_name,
                namespace=self._temporal_namespace,
                grant=self._grant,
            ),
            token=SecretStr(self._token),
        )

    async def close(self) -> None:
        """Closes the connection."""
        if self._channel is not None:
            await self._channel.close()

    async def _call(self, method: str, request: Message, answer: type[_Answer]) -> _Answer:
        if self._channel is None:
            trust = grpc.ssl_channel_credentials(self._ticket.authority.encode())
            name = ("grpc.ssl_target_name_override", self._ticket.server_name)
            self._channel = grpc.aio.secure_channel(self._address, trust, options=(name, *_OPTIONS))
        headers = [
            (TOKEN_HEADER, f"Bearer {self._token}"),
            (TICKET_HEADER, self._ticket.secret.get_secret_value()),
            *([(GRANT_HEADER, self._grant)] if self._grant else []),
        ]
        unary: Any = self._channel.unary_unary  # grpc's types do not say what it returns.
        send: Callable[..., Awaitable[bytes]] = unary(f"/{MACHINES_SERVICE}/{method}")
        try:
            content = await send(request.model_dump_json().encode(), metadata=headers, timeout=_TIMEOUT.total_seconds())
        except grpc.aio.AioRpcError as error:
            raise self._explain(error) from error
        try:
            return answer.model_validate_json(content)
        except ValidationError as error:
            raise Refused(
                f"the gateway at {self._address} sent an answer that this release cannot read",
                remedy="Install the release of the site.",
            ) from error

    def _explain(self, error: grpc.aio.AioRpcError) -> PerdureError:
        details = error.details() or error.code().name
        match error.code():
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return ControlPlaneOverloaded(f"the gateway has no capacity: {details}")
            case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED | grpc.StatusCode.CANCELLED:
                return ControlPlaneUnreachable(
                    f"the gateway at {self._address} does not answer: {details}",
                    remedy="Running nodes continue to train without it. Check --gateway, and the route to it.",
                )
            case grpc.StatusCode.UNAUTHENTICATED:
                return NotPermitted(
                    f"the gateway refuses: {details}",
                    remedy="`perdure ticket NAME` makes another ticket, where Temporal is reachable.",
                )
            case grpc.StatusCode.UNIMPLEMENTED:
                return Refused(
                    f"the gateway at {self._address} does not serve machines that join",
                    remedy="Upgrade the gateways.",
                )
            case _:
                return Refused(f"the gateway refuses: {details}")
