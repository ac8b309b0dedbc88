"""The warm interpreter: Python, stopped in its own start with torch imported, which forks the ranks of its node.

It is started with the ranks' command line and calls `wait_to_be_forked` from a `sitecustomize` that stands first on its
path. There it imports, serves requests, and returns only in processes that it forked: those go on with their start and
run the script. It has one thread, has run no operation and touched no device, so that a fork of it is as good as new.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, cast

from ..processes import die_with_parent
from .context import difference, process_context
from .names import COLD, ENDED, FOLDER_VARIABLE, LISTENING_VARIABLE, REFUSAL, SOCKET, STARTED, record_start
from .plan import AUTOLOAD_VARIABLE, START, Plan

_PRELOADED = ("torch", "torch._dynamo")
"""torch._dynamo is imported by the first optimizer, and costs as much again as torch."""
_REQUEST_TIMEOUT_S = 2.0
_LARGEST_PIECE = 1 << 20
_REFUSED = 1


@dataclass(frozen=True, kw_only=True)
class _Request:
    connection: socket.socket
    arguments: tuple[str, ...]
    environment: dict[str, str]
    context: dict[str, str]
    files: tuple[int, ...]
    """Standard input, output and error."""

    def close(self) -> None:
        self.connection.close()
        for file in self.files:
            os.close(file)


@dataclass(kw_only=True)
class _Rank:
    pid: int
    connection: socket.socket
    abandoned: bool = False
    """Its stand-in is gone: it was killed."""


class _Unfit(Exception):
    """This interpreter cannot be forked from; the message says why."""


def wait_to_be_forked() -> None:
    """Serves until the process is killed. Returns in forked ranks, which then are as if they had just been started.

    The caller must end the process where this raises: to go on would run the script outside any world.
    """
    # Killed with the torchrun that started it, and its ranks with it, as torchrun's own would be.
    die_with_parent()
    folder = os.environ[FOLDER_VARIABLE]
    plan = Plan.of_process(os.getpid())
    listening = socket.socket(fileno=int(os.environ[LISTENING_VARIABLE]))
    listening.set_inheritable(False)
    traces = _Traces()
    try:
        with traces.kept():
            _leave_path(f"{folder}/{START}")
            _import()
    except _Unfit as unfit:
        _refuse(folder, str(unfit))
    except Exception as error:
        _refuse(folder, f"the warm interpreter could not prepare: {type(error).__name__}: {error}")
        raise
    request = _Server(plan, listening).serve()
    _become(plan, folder, request, traces)


class _Traces:
    """What imports leave behind beside modules, and each rank that imports would have: output and variables."""

    def __init__(self) -> None:
        self._written = {1: b"", 2: b""}
        """By stream; warnings, mostly."""
        self._variables: dict[str, str | None] = {}
        """Set by imports, or removed."""

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        """Keeps what is left behind within."""
        before = dict(os.environ)
        own = {stream: os.dup(stream) for stream in self._written}
        kept = {stream: os.memfd_create("written") for stream in self._written}
        for stream, file in kept.items():
            os.dup2(file, stream)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for stream, file in kept.items():
                os.dup2(own[stream], stream)
                os.close(own[stream])
                self._written[stream] = os.pread(file, _LARGEST_PIECE, 0)
                os.close(file)
                _write(stream, self._written[stream])
            after = dict(os.environ)
            self._variables = {
                name: after.get(name) for name in {*before, *after} if before.get(name) != after.get(name)
            }

    def leave(self) -> None:
        """Leaves them behind in this process too."""
        for name, value in self._variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for stream, text in self._written.items():
            _write(stream, text)


def _write(stream: int, text: bytes) -> None:
    with contextlib.suppress(OSError):
        while text:
            text = text[os.write(stream, text) :]


def _refuse(folder: str, reason: str) -> None:
    _log(f"not warm: {reason}")
    with open(f"{folder}/{REFUSAL}", "w", encoding="utf-8") as file:
        file.write(reason)
    os.unlink(f"{folder}/{SOCKET}")
    os._exit(_REFUSED)


def _leave_path(ours: str) -> None:
    """Takes our folder off the path, and runs the `sitecustomize` that it hides, as Python would have."""
    sys.path.remove(ours)
    sys.path_importer_cache.pop(ours, None)
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _import() -> None:
    """Imports what ranks will, and makes sure that the result can be forked.

    Raises:
        _Unfit: if it cannot.
    """
    for name in _PRELOADED:
        importlib.import_module(name)
    # Libraries that know forks, as OpenBLAS does, put their threads away at the first one.
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise _Unfit(f"its imports started {threads - 1} threads, which a fork would lose")
    import torch

    if torch.cuda.is_initialized():
        raise _Unfit("its imports initialised CUDA, which cannot be used after a fork")
    gc.collect()
    # What is there now is never collected, so forks share its memory instead of copying it at their first collection.
    gc.freeze()


class _Server:
    """Forks a rank per request, passes signals to it and its end back, all in one thread."""

    def __init__(self, plan: Plan, listening: socket.socket) -> None:
        self._plan = plan
        self._context = process_context()
        self._listening = listening
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._ranks: dict[int, _Rank] = {}
        """By pidfd."""
        self._requests: list[_Request] = []
        self._watch(listening.fileno(), self._accept)

    def serve(self) -> _Request:
        """Returns in forked ranks only, with the request that led to each."""
        while True:
            for descriptor, _ in self._poll.poll():
                if handler := self._handlers.get(descriptor):
                    handler()
            # A rank that was killed may still hold its device and its ports: the next must not meet it.
            while self._requests and not any(rank.abandoned for rank in self._ranks.values()):
                request = self._requests.pop(0)
                if self._fork(request):
                    return request

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        try:
            connection.settimeout(_REQUEST_TIMEOUT_S)
            request = _read_request(connection)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            _log(f"a request could not be read: {error!r}")
            connection.close()
            return
        if reason := self._mismatch(request):
            _answer(connection, f"{COLD} {reason}")
            request.close()
        else:
            self._requests.append(request)

    def _mismatch(self, request: _Request) -> str:
        """Why a rank that this request asks for would differ from a fork of ours; empty where it would not."""
        if found := self._plan.difference(request.arguments, request.environment):
            return found
        if names := difference(self._context, request.context):
            return f"it was started with another {names}"
        return ""

    def _fork(self, request: _Request) -> bool:
        """Whether this is the forked rank."""
        if _has_closed(request.connection):
            request.close()
            return False
        try:
            pid = os.fork()
        except OSError as error:
            _answer(request.connection, f"{COLD} fork: {error.strerror}")
            request.close()
            return False
        if pid == 0:
            self._close()
            return True
        for file in request.files:
            os.close(file)
        rank = _Rank(pid=pid, connection=request.connection)
        ended = os.pidfd_open(pid)
        self._ranks[ended] = rank
        self._watch(ended, lambda: self._end(rank, ended))
        self._watch(rank.connection.fileno(), lambda: self._pass_on(rank))
        return False

    def _close(self) -> None:
        """In a forked rank: what belongs to the server, and to other ranks."""
        self._listening.close()
        for ended, rank in self._ranks.items():
            os.close(ended)
            rank.connection.close()
        for request in self._requests:
            request.close()

    def _pass_on(self, rank: _Rank) -> None:
        """Signals for the rank, from its stand-in; one that is gone has been killed, and so is the rank."""
        try:
            received = rank.connection.recv(4096)
        except OSError:
            received = b""
        if received:
            for number in received.split():
                _signal(rank.pid, int(number))
            return
        self._forget(rank.connection.fileno())
        rank.connection.close()
        rank.abandoned = True
        _signal(rank.pid, signal.SIGKILL)

    def _end(self, rank: _Rank, ended: int) -> None:
        _, status = os.waitpid(rank.pid, 0)
        self._forget(ended)
        os.close(ended)
        del self._ranks[ended]
        if not rank.abandoned:
            self._forget(rank.connection.fileno())
            _answer(rank.connection, f"{ENDED} {os.waitstatus_to_exitcode(status)}")
            rank.connection.close()

    def _watch(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, select.POLLIN)

    def _forget(self, descriptor: int) -> None:
        del self._handlers[descriptor]
        self._poll.unregister(descriptor)


def _become(plan: Plan, folder: str, request: _Request, traces: _Traces) -> None:
    """Makes the forked process the rank that was asked for, and says so."""
    die_with_parent()
    os.setsid()
    for number, file in enumerate(request.files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request.environment)
    # Arguments may differ from rank to rank (torchrun's macros); the script was not looked at yet.
    own = request.arguments[plan.script_index + 1 :]
    sys.argv[1:] = own
    sys.orig_argv[1:] = request.arguments
    traces.leave()
    _reseed()
    _load_plugins()
    # What a collection at the end finds and reports is then as ever.
    atexit.register(gc.unfreeze)
    record_start(folder, warm=True)
    _answer(request.connection, STARTED)
    request.connection.close()


def _reseed() -> None:
    """As Python does with its own generator at a fork: those of a script that sets no seed differ in all ranks."""
    sys.modules["torch"].default_generator.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def _load_plugins() -> None:
    """As the end of `import torch` would have, with the rank's environment: devices' plugins, and our step counter."""
    if os.environ.get(AUTOLOAD_VARIABLE, "1") == "1":
        import torch

        torch._import_device_backends()  # pyright: ignore[reportPrivateUsage]


def _read_request(connection: socket.socket) -> _Request:
    message, files, _, _ = socket.recv_fds(connection, _LARGEST_PIECE, 3)
    while message and not message.endswith(b"\n"):
        piece = connection.recv(_LARGEST_PIECE)
        if not piece:
            break
        message += piece
    try:
        fields = cast("dict[str, Any]", json.loads(message))
        return _Request(
            connection=connection,
            arguments=tuple(fields["arguments"]),
            environment=fields["environment"],
            context=fields["context"],
            files=(files[0], files[1], files[2]),
        )
    except (ValueError, KeyError, TypeError, IndexError):
        for file in files:
            os.close(file)
        raise


def _has_closed(connection: socket.socket) -> bool:
    """Whether nobody waits for the answer any more."""
    gone = select.poll()
    gone.register(connection.fileno(), select.POLLRDHUP)
    return bool(gone.poll(0))


def _answer(connection: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(f"{line}\n".encode())


def _log(text: str) -> None:
    """Not by `logging`, which is the script's to set up."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _signal(pid: int, number: int) -> None:
    """To the rank and its process group, as torchrun signals its own children."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        # It has not made its group yet.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
