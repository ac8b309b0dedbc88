"""The gateway's server: authenticates each call, limits and checks it, and passes it on to Temporal."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message
from pydantic import SecretBytes
from temporalio.client import Client
from temporalio.service import RPCError

from perdure.credentials.certificates import GATEWAY_LIFETIME, Authority, Certificate
from perdure.credentials.grants import NotGranted
from perdure.encryption.codec import PayloadEncryption
from perdure.gateway.callers import Callers, Unauthenticated, Unavailable
from perdure.gateway.calls import CALLS, SERVICE, Call, Denied
from perdure.gateway.limits import AGENT, MESSAGE_BYTES, Limits, TooMany
from perdure.gateway.payloads import GatewayPayloads
from perdure.gateway.recent import Recent

logger = logging.getLogger("perdure.gateway")

_LONGEST_CALL: Final = 90.0
"""Seconds. The longest calls are polls, which the server answers after a minute."""
_REFUSAL_DELAY: Final = 0.5
"""Seconds before a refusal is answered: who repeats refused calls waits, and costs next to nothing meanwhile."""
_LOG_INTERVAL: Final = 60.0
"""Seconds in which the same refusal of the same node is logged once."""

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    # An agent has some ten calls in progress. Refused calls that wait count, too.
    ("grpc.max_concurrent_streams", 100),
    # The SDK pings every 30 s; by default a server ends connections that ping more often than every five minutes.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A machine that disappeared leaves polls behind, which would be handed tasks.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Agents spread over the replicas again after one of them was replaced. The grace is longer than any call.
    ("grpc.max_connection_age_ms", 600_000),
    ("grpc.max_connection_age_grace_ms", 120_000),
    ("grpc.so_reuseport", 0),
)

_Context = grpc.aio.ServicerContext[bytes, bytes]
_Handle = Callable[[bytes, _Context], Awaitable[bytes]]


class _Refused(Exception):
    """A call is refused."""

    def __init__(self, who: str, status: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.who, self.status, self.reason = who, status, reason


class Gateway:
    """Serves agents.

    Invariants: nothing is passed on before grant, pod and request were checked; a task that Temporal hands out is
    passed on to the agent that polled for it, or to no agent.
    """

    def __init__(
        self,
        temporal: Client,
        callers: Callers,
        keys: Sequence[SecretBytes],
        *,
        encryption: PayloadEncryption | None = None,
    ) -> None:
        """Creates a gateway that is not started.

        Args:
            temporal: Connected to the namespace of the jobs.
            callers: Authenticates agents.
            keys: Sign task tokens.
            encryption: Of the payloads that Temporal stores; by default they are plain.
        """
        self._payloads = GatewayPayloads(encryption or PayloadEncryption.of(None))
        self._temporal = temporal
        self._callers = callers
        self._keys = keys
        self._limits = Limits(AGENT)
        self._stopping = asyncio.Event()
        self._logged = Recent[tuple[str, str], float](1000)
        self._server = grpc.aio.server(options=_OPTIONS)
        self._server.add_generic_rpc_handlers((_Methods(self),))

    async def start(self, address: str, authority: Authority) -> int:
        """Starts to serve; returns the port.

        Args:
            address: Host and port; port 0 for any free one.
            authority: Issues the certificate.

        Raises:
            OSError: if the address cannot be used.
        """
        try:
            port = self._server.add_secure_port(address, _credentials(authority))
        except RuntimeError as error:
            raise OSError(f"{address} cannot be listened at: {error}") from error
        await self._server.start()
        return port

    async def stop(self, grace: timedelta) -> None:
        """Lets calls in progress end, and polls at once, so that agents connect to another replica."""
        self._stopping.set()
        await self._server.stop(grace.total_seconds())

    async def serve(self, call_type: type[Call[Any, Any]], content: bytes, context: _Context) -> Message:
        """Answers one call."""
        try:
            return await self._serve(call_type, content, context)
        except _Refused as refused:
            self._log(refused.who, call_type.__name__, refused.reason)
            await asyncio.sleep(_REFUSAL_DELAY)
            return await context.abort(refused.status, refused.reason)
        except Unavailable as error:
            return await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except RPCError as error:
            # As the server answered. Its details stay here: agents need none.
            status = next(one for one in grpc.StatusCode if one.value[0] == int(error.status))
            return await context.abort(status, error.message)

    async def _serve(self, call_type: type[Call[Any, Any]], content: bytes, context: _Context) -> Message:
        headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        who = context.peer()
        try:
            grant = self._callers.grant(headers)
            who = grant.node
            await self._callers.authenticate(grant, headers, address=_host_of(context.peer()))
            with self._limits.one_call(grant.node):
                return await self._pass_on(call_type(grant, self._keys), content, context)
        except Unauthenticated as error:
            raise _Refused(who, grpc.StatusCode.UNAUTHENTICATED, str(error)) from error
        except TooMany as error:
            raise _Refused(who, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from error
        except (Denied, NotGranted) as error:
            raise _Refused(who, grpc.StatusCode.PERMISSION_DENIED, str(error)) from error
        except DecodeError as error:
            reason = "the request is no message of this method"
            raise _Refused(who, grpc.StatusCode.INVALID_ARGUMENT, reason) from error

    async def _pass_on(self, call: Call[Any, Any], content: bytes, context: _Context) -> Message:
        request = call.check(call.request.FromString(content))
        if not call.forwarded:
            return call.response()
        namespace = call.grant.temporal_namespace
        await self._payloads.encrypt(request, namespace=namespace, workflow=call.workflow)
        remaining = context.time_remaining()
        timeout = timedelta(seconds=min(remaining or _LONGEST_CALL, _LONGEST_CALL))
        method = getattr(self._temporal.workflow_service, _snake_case(type(call).__name__))
        # The SDK does not retry: it is the agent that decides for how long an answer is worth waiting for.
        forwarded = asyncio.ensure_future(method(request, retry=False, timeout=timeout))
        if call.long:
            await _first_of(forwarded, self._stopping)
            if not forwarded.done():
                forwarded.cancel()
                return call.response()
        response = await forwarded
        await self._payloads.decrypt(response, namespace=namespace, workflow=call.workflow)
        return call.answer(response)

    def _log(self, who: str, method: str, reason: str) -> None:
        now = time.monotonic()
        last = self._logged.get((who, reason))
        if last is None or now - last > _LOG_INTERVAL:
            self._logged.put((who, reason), now)
            logger.warning("refused %s of %s: %s", method, who, reason)


class _Methods(grpc.GenericRpcHandler):
    """Finds the handler of a method. Methods that are not known here are answered as not implemented."""

    def __init__(self, gateway: Gateway) -> None:
        self._handlers: dict[str, Any] = {
            f"/{SERVICE}/{name}": grpc.unary_unary_rpc_method_handler(_handler(gateway, call))
            for name, call in CALLS.items()
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._handlers.get(handler_call_details.method)


def _handler(gateway: Gateway, call: type[Call[Any, Any]]) -> _Handle:
    async def handle(content: bytes, context: _Context) -> bytes:
        return (await gateway.serve(call, content, context)).SerializeToString()

    return handle


async def _first_of(forwarded: asyncio.Future[Any], stopping: asyncio.Event) -> None:
    """Returns when the call has ended or the gateway stops. Cancels the call if the agent hangs up."""
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((forwarded, stop), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        forwarded.cancel()
        raise
    finally:
        stop.cancel()


def _credentials(authority: Authority) -> grpc.ServerCredentials:
    """Returns credentials with a certificate that is issued anew before it expires."""
    issued_at = time.monotonic()

    def renewed() -> Any:
        nonlocal issued_at
        if time.monotonic() - issued_at < GATEWAY_LIFETIME.total_seconds() / 2:
            return None
        issued_at = time.monotonic()
        return _configuration(authority.issue())

    return grpc.dynamic_ssl_server_credentials(
        _configuration(authority.issue()), renewed, require_client_authentication=False
    )


def _configuration(one: Certificate) -> Any:
    return grpc.ssl_server_certificate_configuration([(one.private_key, one.certificate)])


def _host_of(peer: str) -> str:
    """Returns the address without the port, such as `ipv4:10.0.0.1`."""
    return peer.rpartition(":")[0]


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
