"""Calls of methods from one role to another: at most once, with timeouts, and only within the job.

    # In a role with `ready: {port: 6100}`:
    roles.export(Reward()).join()

    # In another one:
    score = roles.call("reward", "score", trajectory, timeout=timedelta(seconds=30))

Arguments and results are pickles, so a message is read only after its sender has proved that it knows the job's secret:
a random key in the job's store, which nodes of the job alone can read. Python's `multiprocessing.connection` has such a
proof, but no timeouts, and does not protect what follows the proof.

A call is one connection. The server sends a nonce. The caller answers with a nonce, the length and the digest of its
request, their code under the secret, and the request; the result comes back in the same form. A code is valid for its
connection and its direction only.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import pickle
import secrets
import socket
import socketserver
import struct
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

from perdure_training.background import Strangers
from perdure_training.node_api.addresses import split_address
from perdure_training.node_api.rank_environment import ADDRESS_VARIABLE, PORT_VARIABLE
from perdure_training.roles import directory
from perdure_training.store import JobStore, StoreError

logger = logging.getLogger(__name__)

_SECRET = "perdure.roles.secret"
_NONCE = 32
_HEADER = struct.Struct(f">{_NONCE}sQ32s32s")
"""The sender's nonce, the length and the digest of the message, and the code."""
_PROOF_WITHIN = 10.0
"""Seconds in which a caller has to prove itself and send its request."""
_STRANGERS = 64
"""Connections at a time whose callers have not proved themselves; a further one ends the oldest. Each has a thread."""
_PAUSE = 0.2
"""Seconds between two attempts to reach a role that recovers."""
_RENEW_AGAIN = 10.0
"""Seconds after which the store is asked again for its secret at the earliest: strangers know none either."""
_RENEW_WITHIN = timedelta(seconds=3)
_SHARED = "Classes of arguments and results have to be in a module that both scripts import, not in one of the scripts"


class RoleUnavailable(ConnectionError):
    """A role was not reached, or its process ended before it answered; the message has the role's state."""


class CallTimeout(TimeoutError):
    """The answer did not come in time. The call may still be carried out."""


class CallFailed(RuntimeError):
    """The method has raised an exception; the message has its text and traceback."""


@dataclass(frozen=True)
class _Request:
    method: str
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]


@dataclass(frozen=True)
class _Answer:
    result: Any = None
    problem: str = ""


def export(target: object) -> threading.Thread:
    """Lets other roles call the public methods of an object, one call at a time.

    Args:
        target: The object. This process keeps it for as long as it runs.

    Returns:
        The thread that serves: `join` it where the process does nothing else.

    Raises:
        RuntimeError: if this process's role has no port.
        StoreError: if Perdure did not start this process, or the job's store does not answer.
    """
    port = os.environ.get(PORT_VARIABLE)
    if port is None:
        raise RuntimeError("this role has no port at which it can be called: give it `ready: {port: …}`")
    server = _Server(int(port), target, _job_secret(), renewed=_renewed_secret)
    thread = threading.Thread(target=server.serve_forever, name="calls of other roles", daemon=True)
    thread.start()
    return thread


def call(
    role: str,
    method: str,
    *arguments: Any,
    rank: int | Literal["all"] = 0,
    timeout: timedelta = timedelta(seconds=60),
    wait: timedelta = timedelta(),
    **named: Any,
) -> Any:
    """Calls a method of the object that another role exports. It is carried out at most once.

    Args:
        role: The role.
        method: The method's name.
        *arguments: Its arguments.
        rank: The process of the role; "all" calls each of them, and returns their results in a list.
        timeout: The longest wait for the answer.
        wait: How long to wait for a role that recovers, before anything is sent to it.
        **named: Further arguments of the method.

    Raises:
        KeyError: if the job has no such role.
        RoleUnavailable: if the process cannot be reached, or ended before it answered: then the message says that the
            call may have been carried out.
        CallTimeout: if there was no answer in time.
        CallFailed: if the method has raised an exception.
    """
    request = pickle.dumps(_Request(method, arguments, named))
    if rank != "all":
        return _call_process(role, rank, request, method, timeout, wait)
    # A role without some of its nodes has gaps.
    ranks = [rank for rank, address in enumerate(_ready(role, wait).addresses) if address]
    if not ranks:
        raise RoleUnavailable(f"role {role} has no process that can be called; {_state(role)}")

    def call_one(rank: int) -> Any:
        return _call_process(role, rank, request, method, timeout, wait)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(call_one, ranks))


def _call_process(role: str, rank: int, request: bytes, method: str, timeout: timedelta, wait: timedelta) -> Any:
    secret = _job_secret()
    connection = _connect(role, rank, timeout, wait)
    with connection:
        try:
            theirs = _receive_exactly(connection, _NONCE)
            ours = secrets.token_bytes(_NONCE)
            _send(connection, secret, b"request", ours, theirs, request)
            pickled = _receive(connection, secret, b"answer", ours)
        except TimeoutError:
            raise CallTimeout(f"{role}.{method}: no answer within {timeout}; it may still be carried out") from None
        except _Refused:
            raise RoleUnavailable(f"{role}.{method}: another program answers in place of rank {rank}") from None
        except OSError as error:
            if _renewed_secret(secret) != secret:
                raise RoleUnavailable(
                    f"{role}.{method}: rank {rank} has closed the connection: the job's store has begun anew (its "
                    "workflow was terminated), and this process knew the secret of the one before. It knows the new "
                    f"one now. Call again; should rank {rank} know the old one, the call may have been carried out"
                ) from error
            raise RoleUnavailable(
                f"{role}.{method}: the connection to rank {rank} was lost, and the call may have been carried out: "
                f"{error}; {_state(role)}"
            ) from error
    try:
        answer: _Answer = pickle.loads(pickled)
    except Exception as error:
        raise CallFailed(
            f"{role}.{method}, rank {rank}: was carried out, but its result cannot be read here. {_SHARED}: {error}"
        ) from error
    if answer.problem:
        raise CallFailed(f"{role}.{method}, rank {rank}: {answer.problem}")
    return answer.result


def _connect(role: str, rank: int, timeout: timedelta, wait: timedelta) -> socket.socket:
    """Returns a connection whose reads end in time.

    Raises:
        RoleUnavailable: if there is none.
    """
    end = time.monotonic() + wait.total_seconds()
    while True:
        address = _reachable(role, rank, timedelta(seconds=max(end - time.monotonic(), 0))).addresses[rank]
        try:
            return socket.create_connection(split_address(address), timeout.total_seconds())
        except OSError as error:
            if time.monotonic() >= end:
                raise RoleUnavailable(f"rank {rank} at {address} is not reached: {error}; {_state(role)}") from None
        time.sleep(_PAUSE)


def _reachable(role: str, rank: int, wait: timedelta) -> directory.Role:
    """Returns the role once it is ready.

    Raises:
        RoleUnavailable: if it is not in time, or has no such process or no ports.
    """
    found = _ready(role, wait)
    if rank >= len(found.addresses) or ":" not in found.addresses[rank]:
        raise RoleUnavailable(f"rank {rank} of role {role} has no address with a port; {_state(role)}")
    return found


def _ready(role: str, wait: timedelta) -> directory.Role:
    try:
        return directory.wait_for(role, timeout=wait)
    except directory.RoleTimeout:
        raise RoleUnavailable(_state(role)) from None


def _state(role: str) -> str:
    known = directory.role_named(role)
    word = "has completed" if known.completed else "is ready" if known.ready else "is not ready: it starts or recovers"
    return f"role {role} {word} (generation {known.generation}, {sum(map(bool, known.addresses))} addresses)"


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = _STRANGERS

    def __init__(self, port: int, target: object, secret: bytes, *, renewed: Callable[[bytes], bytes]) -> None:
        self._target = target
        self._secret = secret
        self._renewed = renewed
        self._one_at_a_time = threading.Lock()
        self._strangers = Strangers()
        self.address_family, place = _listening_place(port)
        super().__init__(place, _Handler)

    def server_bind(self) -> None:
        if self.server_address[0] == "::":
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._strangers) >= _STRANGERS:
            self._strangers.end_oldest()
        self._strangers.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._strangers.remove(request)
        super().shutdown_request(request)

    def serve(self, connection: socket.socket) -> None:
        """Carries out the call of one connection."""
        connection.settimeout(_PROOF_WITHIN)
        ours = secrets.token_bytes(_NONCE)
        connection.sendall(ours)
        proven = partial(self._strangers.remove, connection)
        request, theirs, secret = self._receive(connection, ours, proven)
        with self._one_at_a_time:
            answer = _carry_out(self._target, request)
        connection.settimeout(None)
        _send(connection, secret, b"answer", ours, theirs, answer)

    def _receive(
        self, connection: socket.socket, ours: bytes, proven: Callable[[], None]
    ) -> tuple[bytes, bytes, bytes]:
        """Returns a request, its sender's nonce, and the secret that it knows: that of a sender which has started since
        the job's store began anew may be another one than this process knows.

        Raises:
            _Refused: if the sender does not know the job's secret.
            OSError: if the request ends too early.
        """
        header, secret = _receive_exactly(connection, _HEADER.size), self._secret
        try:
            return *_read(connection, header, secret, b"request", ours, proven=proven), secret
        except _Unknown:
            self._secret = secret = self._renewed(secret)
            return *_read(connection, header, secret, b"request", ours, proven=proven), secret


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        try:
            self.server.serve(self.request)
        except (OSError, _Refused) as error:
            # The agent's question whether the port answers ends here, too.
            logger.debug("a call of %s was not carried out or not answered: %s", self.client_address, error)


def _carry_out(target: object, pickled: bytes) -> bytes:
    try:
        request: _Request = pickle.loads(pickled)
    except Exception:
        problem = f"was not called, since its arguments cannot be read there. {_SHARED}\n{traceback.format_exc()}"
        return pickle.dumps(_Answer(problem=problem))
    try:
        method: Any = None if request.method.startswith("_") else getattr(target, request.method, None)
        if not callable(method):
            return pickle.dumps(_Answer(problem=f"{type(target).__name__} has no public method {request.method!r}"))
        answer: Any = method(*request.arguments, **request.named)
        return pickle.dumps(_Answer(answer))
    except Exception:
        return pickle.dumps(_Answer(problem=traceback.format_exc()))


class _Refused(Exception):
    """The sender has not proved that it knows the secret."""


def _send(connection: socket.socket, secret: bytes, direction: bytes, own: bytes, other: bytes, content: bytes) -> None:
    digest = hashlib.sha256(content).digest()
    code = _code(secret, direction, own, other, len(content), digest)
    connection.sendall(_HEADER.pack(own, len(content), digest, code) + content)


class _Unknown(_Refused):
    """Not by its code: the secret of the sender is another one."""


def _receive(connection: socket.socket, secret: bytes, direction: bytes, own: bytes) -> bytes:
    return _read(connection, _receive_exactly(connection, _HEADER.size), secret, direction, own)[0]


def _read(
    connection: socket.socket,
    header: bytes,
    secret: bytes,
    direction: bytes,
    own: bytes,
    *,
    proven: Callable[[], None] = lambda: None,
) -> tuple[bytes, bytes]:
    """Returns a message, whose length is trusted only after the proof, and its sender's nonce.

    Args:
        connection: Where it comes from.
        header: What was received of it.
        secret: The job's secret.
        direction: The direction for which it was sent.
        own: The nonce that the sender was given.
        proven: Is called once the sender has proved that it knows the secret.

    Raises:
        _Refused: if the sender does not know the secret.
        OSError: if it ends before the message does.
    """
    other, length, digest, code = _HEADER.unpack(header)
    if not hmac.compare_digest(code, _code(secret, direction, other, own, length, digest)):
        raise _Unknown("the sender does not know the job's secret")
    proven()
    content = _receive_exactly(connection, length)
    if hashlib.sha256(content).digest() != digest:
        raise _Refused("the message was changed on its way")
    return content, other


def _code(secret: bytes, direction: bytes, own: bytes, other: bytes, length: int, digest: bytes) -> bytes:
    return hmac.digest(secret, b"".join((direction, own, other, length.to_bytes(8, "big"), digest)), "sha256")


def _receive_exactly(connection: socket.socket, length: int) -> bytes:
    content = bytearray(length)
    view, got = memoryview(content), 0
    while got < length:
        count = connection.recv_into(view[got:])
        if count == 0:
            raise ConnectionResetError("it was closed")
        got += count
    return bytes(content)


class _KnownSecret:
    """The key that all processes of the job know; the first that needs it makes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value: bytes | None = None
        self._renewed_at = -_RENEW_AGAIN

    def value(self) -> bytes:
        """Returns it.

        Raises:
            StoreError: if the job's store does not answer, and has not before.
        """
        with self._lock:
            if self._value is None:
                self._value = JobStore(lasting=True).compare_set(_SECRET, "", secrets.token_hex(32))
            return self._value

    def renewed(self, used: bytes) -> bytes:
        """Returns the one that the job's store has now, which may have begun anew since `used` was read from it; `used`
        where it does not answer, or was asked a moment ago. It gets back the secret that it has lost, unless a process
        that has started since has made another."""
        with self._lock:
            now = time.monotonic()
            if self._value == used and now >= self._renewed_at + _RENEW_AGAIN:
                self._renewed_at = now
                try:
                    self._value = JobStore(lasting=True, timeout=_RENEW_WITHIN).compare_set(_SECRET, "", used)
                except StoreError as error:
                    logger.info("the job's store was not asked for its secret: %s", error)
            return used if self._value is None else self._value


_known = _KnownSecret()


def _job_secret() -> bytes:
    return _known.value()


def _renewed_secret(used: bytes) -> bytes:
    return _known.renewed(used)


def _listening_place(port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Returns where to listen: at the node's own address where one of its interfaces has it, else at all of them.

    The address that the role's callers are told is theirs: it may be a name that does not resolve here, that still has
    the address of an earlier pod, or an address that is translated on the way to this node.
    """
    address = os.environ.get(ADDRESS_VARIABLE, "")
    own_family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if _is_number(own_family, address) and _can_listen(own_family, address):
        return own_family, (address, port)
    if socket.has_dualstack_ipv6() and _can_listen(socket.AF_INET6, "::"):
        return socket.AF_INET6, ("::", port)
    return socket.AF_INET, ("0.0.0.0", port)


def _is_number(family: socket.AddressFamily, address: str) -> bool:
    """Whether it is an address and no name."""
    try:
        socket.inet_pton(family, address)
    except OSError:
        return False
    return True


def _can_listen(family: socket.AddressFamily, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
