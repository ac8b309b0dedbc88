"""The gateway's server: authenticates each call, limits and checks it, and passes it on to Temporal."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

import grpc
import pydantic
from google.protobuf.message import DecodeError, Message
from pydantic import SecretBytes
from temporalio.client import Client
from temporalio.service import RPCError

from perdure.base.credentials.grants import NotGranted
from perdure.base.credentials.names import MACHINES_SERVICE, RESULT
from perdure.base.encryption.codec import PayloadEncryption
from perdure.contract.base import shorten
from perdure.gateway.callers import Callers, PlaceLost, Unauthenticated, Unavailable
from perdure.gateway.calls import CALLS, SERVICE, Call, Denied
from perdure.gateway.certificates import ServerCertificates
from perdure.gateway.connections import BOUNDS, INTERVAL, ConnectionBounds, Connections, host_of
from perdure.gateway.limits import AGENT, MESSAGE_BYTES, Bodies, Limits, Refusals, TooMany
from perdure.gateway.lru_cache import LruCache
from perdure.gateway.machines import METHODS, Machines
from perdure.gateway.memberships import Memberships
from perdure.gateway.metrics import GatewayMetrics, Reason
from perdure.gateway.payloads import GatewayPayloads
from perdure_training.node_api.addresses import host_and_port, split_address

logger = logging.getLogger("perdure.gateway")

_LONGEST_CALL: Final = 90.0
"""Seconds. The longest calls are polls, which the server answers after a minute."""
_LONGEST_REASON: Final = 500
"""Characters of why a call is refused."""
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
    # Without a call in progress an agent needs no connection, and a stranger's costs memory (`connections`).
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),
    # What arrives of a body that is not read yet stays in memory: no more than this.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 16_384),
)

_Answer = TypeVar("_Answer", Message, pydantic.BaseModel)
_Context = grpc.aio.ServicerContext[bytes, bytes]


class _Refused(Exception):
    """A call is refused."""

    def __init__(self, who: str, status: grpc.StatusCode, kind: Reason, reason: str) -> None:
        super().__init__(reason)
        # It quotes what the caller has sent, and is logged and remembered.
        self.who, self.status, self.kind, self.reason = who, status, kind, shorten(reason, _LONGEST_REASON)


class _HungUp(Exception):
    """A call ended before its request came: the caller has hung up, which is no request of its that is wrong."""


class Gateway:
    """Serves agents.

    Invariants: nothing is passed on before grant, pod and request were checked; requests go to one Temporal namespace,
    whatever a grant names; a task that Temporal hands out is passed on to the agent that polled for it, or to no agent.
    """

    def __init__(
        self,
        temporal: Client,
        callers: Callers,
        keys: Sequence[SecretBytes],
        *,
        encryption: PayloadEncryption | None = None,
        bounds: ConnectionBounds = BOUNDS,
        interval: float = INTERVAL,
    ) -> None:
        """Creates a gateway that is not started.

        Args:
            temporal: Connected to the namespace of the jobs.
            callers: Authenticates agents.
            keys: Sign task tokens.
            encryption: Of the payloads that Temporal stores; by default they are plain.
            bounds: How many connections are kept open.
            interval: Seconds between two looks at them.
        """
        self._payloads = GatewayPayloads(encryption or PayloadEncryption.of(None))
        self._temporal = temporal
        self._callers = callers
        self._keys = keys
        self._limits = Limits(AGENT)
        self._refusals = Refusals()
        self._bodies = Bodies()
        self._memberships = Memberships(temporal)
        self._machines = Machines(temporal, callers, self._memberships, keys)
        self.metrics = GatewayMetrics()
        self.metrics.watch_reviews(lambda: callers.silence)
        self._connections = Connections(self.metrics, bounds, interval=interval)
        self._bounding: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._logged = LruCache[tuple[str, str], float](1000)
        self._server = grpc.aio.server(options=_OPTIONS)
        self._server.add_generic_rpc_handlers((_Methods(self),))

    async def start(self, address: str, certificates: ServerCertificates) -> int:
        """Starts to serve; returns the port.

        Args:
            address: Host and port; without a host, all addresses of this machine, of both families. Port 0 for any free
                one.
            certificates: To show.

        Raises:
            OSError: if the address cannot be used.
        """
        try:
            host, port = split_address(address)
            # To gRPC, `::` stands for both families.
            port = self._server.add_secure_port(host_and_port(host or "::", port), certificates.credentials())
        except (RuntimeError, ValueError) as error:
            raise OSError(f"{address} cannot be listened at: {error}") from error
        await self._server.start()
        self._bounding = asyncio.create_task(self._connections.keep_bounded(port))
        return port

    async def stop(self, grace: timedelta) -> None:
        """Lets calls in progress end, and polls at once, so that agents connect to another replica."""
        self._stopping.set()
        await self._server.stop(grace.total_seconds())
        if self._bounding is not None:
            self._bounding.cancel()
            await asyncio.wait({self._bounding})

    async def serve(self, call_type: type[Call[Any, Any]], _: object, context: _Context) -> bytes:
        """Answers one call of an agent."""
        name = call_type.__name__
        answer = await self._answer(name, self._serve(call_type, context), context, long=call_type.long)
        return answer.SerializeToString()

    async def serve_machine(self, method: str, _: object, context: _Context) -> bytes:
        """Answers one call of a machine that joins."""
        serving = self._serve_machine(method, context)
        answer = await self._answer(method, serving, context, long=method == RESULT)
        return answer.model_dump_json().encode()

    async def _answer(self, method: str, serving: Awaitable[_Answer], context: _Context, *, long: bool) -> _Answer:
        refused = False
        with self.metrics.one_call(method, long=long) as record:
            try:
                answer = await serving
                record.outcome = grpc.StatusCode.OK.name
                return answer
            except _Refused as refusal:
                self._log(refusal.who, method, refusal.reason)
                self.metrics.count_refusal(refusal.kind)
                refused, status, text = True, refusal.status, refusal.reason
            except _HungUp:
                status, text = grpc.StatusCode.CANCELLED, "the call ended before its request came"
            except Unavailable as error:
                status, text = grpc.StatusCode.UNAVAILABLE, str(error)
            except RPCError as error:
                # As the server answered. Its details stay here: agents need none.
                status = next(one for one in grpc.StatusCode if one.value[0] == int(error.status))
                text = error.message
            except Exception:
                record.outcome = grpc.StatusCode.UNKNOWN.name
                raise
            record.outcome = status.name
        if refused:
            await self._refusals.wait(host_of(context.peer()))
        return await context.abort(status, text)

    async def _serve_machine(self, method: str, context: _Context) -> pydantic.BaseModel:
        peer = context.peer()
        with _refusals(address := host_of(peer)):
            return await self._machines.serve(
                method,
                await self._bodies.receive(partial(_read, context), address=address),
                _headers_of(context),
                address=address,
                proven=partial(self._connections.prove, peer),
            )

    async def _serve(self, call_type: type[Call[Any, Any]], context: _Context) -> Message:
        headers = _headers_of(context)
        with _refusals(host_of(context.peer())):
            grant = self._callers.grant(headers)
        with _refusals(grant.node):
            await self._callers.authenticate(grant, headers, address=host_of(context.peer()))
            self._connections.prove(context.peer(), grant.node)
            if grant.temporal_namespace != self._temporal.namespace:
                # Tenants whose gateways share keys by mistake would otherwise reach each other's namespaces.
                raise Denied(f"grant: this gateway does not serve the namespace {grant.temporal_namespace!r}")
            with self._limits.one_call(grant.node), self.metrics.of_agent(grant.node):
                if grant.machine and not grant.created and call_type.reports:
                    await self._memberships.check(grant)
                content = await _read(context)
                self._limits.count_bytes(grant.node, len(content))
                return await self._pass_on(call_type(grant, self._keys), content, context)

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
            logger.warning("rejected %s from %s: %s", method, who, reason)


class _Methods(grpc.GenericRpcHandler):
    """Finds the handler of a method. Methods that are not known here are answered as not implemented."""

    def __init__(self, gateway: Gateway) -> None:
        self._metrics = gateway.metrics
        self._handlers: dict[str, Any] = {
            # Handlers of streams read the body themselves: a caller without proofs takes no memory with it.
            f"/{SERVICE}/{name}": grpc.stream_unary_rpc_method_handler(partial(gateway.serve, call))
            for name, call in CALLS.items()
        } | {
            f"/{MACHINES_SERVICE}/{name}": grpc.stream_unary_rpc_method_handler(partial(gateway.serve_machine, name))
            for name in METHODS
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = self._handlers.get(handler_call_details.method)
        if handler is None:
            self._metrics.unknown_method()
        return handler


@contextmanager
def _refusals(who: str) -> Generator[None]:
    """Gives each reason to refuse a call its status."""
    try:
        yield
    except Unauthenticated as error:
        kind = Reason.PLACE_LOST if isinstance(error, PlaceLost) else Reason.NOT_PROVEN
        raise _Refused(who, grpc.StatusCode.UNAUTHENTICATED, kind, str(error)) from error
    except TooMany as error:
        raise _Refused(who, grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.TOO_MANY, str(error)) from error
    except NotGranted as error:
        raise _Refused(who, grpc.StatusCode.PERMISSION_DENIED, Reason.FOREIGN_TASK, str(error)) from error
    except Denied as error:
        raise _Refused(who, grpc.StatusCode.PERMISSION_DENIED, Reason.NOT_ALLOWED, str(error)) from error
    except DecodeError as error:
        reason = "the request is not a message of this method"
        raise _Refused(who, grpc.StatusCode.INVALID_ARGUMENT, Reason.UNREADABLE, reason) from error


async def _read(context: _Context) -> bytes:
    """Receives the body of a call. The iterator that a handler is given would keep it until the call has ended.

    Raises:
        _HungUp: if there is none.
    """
    content = await context.read()
    if content is grpc.aio.EOF:
        raise _HungUp
    return content


def _headers_of(context: _Context) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


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


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
