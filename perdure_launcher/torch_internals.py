"""Reads and changes parts of torch that are not in its documentation; no other module of Perdure does.

Each function names the versions of torch in which its part was read, and what happens if another version lacks it: the
training then runs as it would without that part, and a log line, a report or the launcher says what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import logging
import signal
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from socket import socket
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from .system.cleaners import kill_group

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousHandlerCreator

logger = logging.getLogger(__name__)

UNLIMITED_RESTARTS = 1_000_000

MULTIPROCESSING_LOGGER = "torch.distributed.elastic.multiprocessing.api"
"""The logger of torchrun's failures and terminations of ranks; read in torch 2.8 and 2.15. If it is another one, failed
ranks are reported without the reason."""

_FAILED = "failed (exitcode"
_TERMINATED = ("Sending process", "Closing process")
_DEEPEST_FRAME = 16
_CAPTURE_MODE_RELAXED = 2
"""`cudaStreamCaptureModeRelaxed`."""


@dataclass(frozen=True)
class Launch:
    """The processes that torchrun is about to start, from its flags, which override the launcher's options."""

    processes: int
    entrypoint: Any
    arguments: tuple[str, ...]


def replace_rendezvous_backends(create: RendezvousHandlerCreator) -> None:
    """Registers a handler in the place of every rendezvous backend, so that the command's flags can name any of them.

    `rendezvous_handler_registry._registry`; read in torch 2.8 and 2.15.

    Raises:
        AttributeError: if it is missing. torch then logs that it cannot load the plugin, torchrun does not find the
            backend `perdure`, and the launcher reports that.
    """
    from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry

    registry: dict[str, Any] = rendezvous_handler_registry._registry  # pyrefly: ignore[protected-access]
    for name in list(registry):
        registry[name] = create


def dump_flight_recorders() -> list[bytes]:
    """Returns the pickled collectives of this process, without their stacks: those over gloo, and those over NCCL.

    `_dump_fr_trace` and `_dump_nccl_trace`; read in torch 2.11 and 2.15. What is missing is left out: ranks then tell
    no collectives of that backend, and their steps are not split.

    Raises:
        AttributeError: if this process uses CUDA, and the function of CUDA that a reading needs is missing.
    """
    import torch

    found = [_dump_flight_recorder("_dump_fr_trace")]
    if torch.cuda.is_initialized():
        with _beside_graph_captures():
            found.append(_dump_flight_recorder("_dump_nccl_trace"))
    return [dump for dump in found if dump is not None]


def _dump_flight_recorder(name: str) -> bytes | None:
    from torch._C import _distributed_c10d

    dump: Callable[[bool, bool, bool], bytes] | None = getattr(_distributed_c10d, name, None)
    try:
        return dump(True, False, False) if dump is not None else None
    except TypeError:
        return None


@contextlib.contextmanager
def _beside_graph_captures() -> Generator[None]:
    """Lets this thread query events of the device while a CUDA graph is captured, which that would end otherwise.

    `cudaThreadExchangeStreamCaptureMode` of the CUDA runtime that torch has loaded; read in CUDA 13.

    Raises:
        AttributeError: if it is missing.
    """
    exchange = ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def current_launch() -> Launch | None:
    """Returns the launch of the torchrun that requests a handler, from the stack frame of `launch_agent`.

    Read in torch 2.8 and 2.15. Returns None if the frame is missing: the handler then uses the job's number of
    processes, and ranks start cold.
    """
    for frame in _callers():
        if frame.f_code.co_name == "launch_agent":
            found = frame.f_locals
            count = getattr(found.get("config"), "nproc_per_node", None)
            if isinstance(count, int):
                arguments = found.get("args") or ()
                return Launch(count, found.get("entrypoint"), tuple(str(word) for word in arguments))
    logger.warning("torchrun's --nproc-per-node cannot be read; assuming the job's number of processes")
    return None


def detach_from_flags(handler: RendezvousHandler) -> None:
    """Removes torchrun's own settings that conflict with the job's control.

    With `--rdzv-backend=static`, which accelerate uses as well, torchrun takes the master's address from its own flags,
    so a world could neither move nor form again on another port. And accelerate by default never restarts ranks; a
    number of restarts in the command itself stays in force.

    The elastic agent's `spec` and `_remaining_restarts`, in the stack frames of the callers; read in torch 2.8 and
    2.15. If the spec is missing, a warning is logged and the flags stay in force; if `_remaining_restarts` is missing,
    the number of restarts does.
    """
    for frame in _callers():
        spec: Any = frame.f_locals.get("spec")
        agent: Any = frame.f_locals.get("self")
        if spec is None or getattr(spec, "rdzv_handler", None) is not handler:
            continue
        spec.master_addr = spec.master_port = None
        missing = UNLIMITED_RESTARTS - spec.max_restarts
        if missing > 0 and not _names_restarts(sys.argv) and hasattr(agent, "_remaining_restarts"):
            spec.max_restarts += missing
            agent._remaining_restarts += missing
        return
    logger.warning("torchrun's own settings cannot be read; a master that the command names stays in force")


def serve_store(host: str, port: int, listening: socket) -> TCPStore:
    """Serves a store on a socket that already listens; the store then owns the socket.

    `torch._C._distributed_c10d.TCPStore` with `master_listen_fd`; read in torch 2.8 and 2.15.

    Raises:
        OSError, RuntimeError, TypeError: if the store cannot be served, or has no such parameter. The handler then
            reports a failed rank with this reason.
    """
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


_Exit = TypeVar("_Exit")


def logged_failures(
    record: logging.LogRecord, *, terminated: Collection[int], exit_of: Callable[[int, int, int, str | None], _Exit]
) -> list[_Exit]:
    """Returns the ranks that failed if torchrun logs a failure of ranks; empty for other records.

    The record's text and arguments, and `_failures` and `error_files` of the object whose `_poll` logs it; read in
    torch 2.8 and 2.15. If the object is missing, only the rank that the record names is returned, without error file.

    Args:
        record: Of the logger `MULTIPROCESSING_LOGGER`.
        terminated: Processes that torchrun terminated; they did not fail.
        exit_of: Creates the exit from local rank, process ID, status (negative for signals) and error file.

    Raises:
        ValueError: if the record has other arguments.
    """
    if not str(record.msg).startswith(_FAILED):
        return []
    context = next((frame.f_locals.get("self") for frame in _callers() if frame.f_code.co_name == "_poll"), None)
    failures: Mapping[int, Any] = getattr(context, "_failures", None) or {}
    found = [
        exit_of(int(one.local_rank), int(one.pid), int(one.exitcode), one.error_file)
        for one in failures.values()
        if not (int(one.pid) in terminated and one.exitcode in (-signal.SIGTERM, -signal.SIGKILL))
    ]
    if found:
        return found
    code, local_rank, pid = (int(str(argument)) for argument in _arguments(record)[:3])
    error_files: Mapping[int, str] = getattr(context, "error_files", None) or {}
    return [exit_of(local_rank, pid, code, error_files.get(local_rank))]


def unlogged_failures(
    *, terminated: Collection[int], exit_of: Callable[[int, int, int, str | None], _Exit]
) -> list[_Exit]:
    """Returns the ranks that ended by themselves, and not with 0, after torchrun had looked at them last: it stopped
    them for a new world, and logs nothing of such ranks.

    `_pcontext` of the elastic agent, in the stack frames of the callers, and `subprocess_handlers`,
    `_running_local_ranks` and `error_files` of it; read in torch 2.8 and 2.15. If one is missing, no rank is returned.

    Args:
        terminated: Processes that torchrun terminated, as it has logged; they did not fail.
        exit_of: Creates the exit from local rank, process ID, status (negative for signals) and error file.
    """
    agents = (frame.f_locals.get("self") for frame in _callers())
    context = next((one for agent in agents if (one := getattr(agent, "_pcontext", None)) is not None), None)
    handlers: Mapping[int, Any] = getattr(context, "subprocess_handlers", None) or {}
    running: Collection[int] = getattr(context, "_running_local_ranks", None) or ()
    error_files: Mapping[int, str] = getattr(context, "error_files", None) or {}
    processes = {local_rank: handlers[local_rank].proc for local_rank in sorted(running) if local_rank in handlers}
    return [
        exit_of(local_rank, process.pid, process.returncode, error_files.get(local_rank))
        for local_rank, process in processes.items()
        if process.returncode and process.pid not in terminated
    ]


def finished_before(record: logging.LogRecord) -> list[int]:
    """Returns the local ranks that had ended with 0 when others failed, if torchrun logs a failure of ranks.

    `subprocess_handlers`, `_running_local_ranks` and `_failures` of the object whose `_poll` logs it; read in torch 2.8
    and 2.15. If one is missing, no rank is returned.
    """
    if not str(record.msg).startswith(_FAILED):
        return []
    context = next((frame.f_locals.get("self") for frame in _callers() if frame.f_code.co_name == "_poll"), None)
    known = [getattr(context, name, None) for name in ("subprocess_handlers", "_running_local_ranks", "_failures")]
    every, running, failed = known
    return [] if None in known else sorted(set(every or ()) - set(running or ()) - set(failed or ()))


def logged_termination(record: logging.LogRecord) -> int | None:
    """Returns the process if torchrun logs that it terminates a rank; None for other records.

    The record's text and arguments; read in torch 2.8 and 2.15. If the text is another one, torchrun's own grace of
    30 s applies.

    Raises:
        ValueError: if the record has other arguments.
    """
    arguments = _arguments(record)
    if not str(record.msg).startswith(_TERMINATED) or not arguments:
        return None
    return int(str(arguments[0]))


def hear_events(handler: logging.Handler) -> None:
    """Adds a handler to the loggers of torch's own events, whichever of them `--event-log-handler` names.

    The level that `LOGLEVEL` names stays in force for torch's handlers, and not for this one.

    `torch.distributed.elastic.events._get_or_create_logger` and `handlers._log_handlers`; read in torch 2.15 only.

    Raises:
        AttributeError: if one is missing. The events then reach only the handler that the command names.
    """
    from torch.distributed.elastic import events
    from torch.distributed.elastic.events import handlers

    known: dict[str, logging.Handler] = handlers._log_handlers
    for name, own in known.items():
        destination: logging.Logger = events._get_or_create_logger(name)
        own.setLevel(max(own.level, destination.level))
        destination.setLevel(logging.INFO)
        destination.addHandler(handler)


def signal_programs(send: Callable[[int, signal.Signals], object]) -> None:
    """Makes torchrun signal each of its ranks once, through this function, where it would signal their process groups,
    that is, also their DataLoader workers. SIGKILL still goes to the groups, but for what cleans up after a rank.

    A torchrun that is signaled twice, as by `timeout` or by a shell's trap, begins to end its ranks twice: the second
    signal would meet a rank that saves.

    `SubprocessHandler.close`, and `proc` of its objects; read in torch 2.8 and 2.15. If it is missing, a warning is
    logged and torchrun signals the groups.
    """
    try:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    except ImportError:
        logger.warning("torchrun's signals to ranks cannot be changed; they also reach the children of ranks")
        return

    def close(self: Any, death_sig: signal.Signals | None = None) -> None:
        if death_sig == signal.SIGKILL:
            kill_group(self.proc.pid)
        elif not getattr(self, "_perdure_signaled", False):
            self._perdure_signaled = True
            send(self.proc.pid, death_sig or signal.SIGTERM)

    SubprocessHandler.close = close


def torchrun_is_terminated() -> bool:
    """Returns whether torchrun is handling the signal that terminates it, as `SignalException`.

    Read in torch 2.8 and 2.15. If the exception has another name, ranks get the stop grace instead of the job's
    termination grace.
    """
    return type(sys.exc_info()[1]).__name__ == "SignalException"


def report_termination_in_one_line() -> None:
    """Makes torchrun print one line when a signal ends it, where Python would print a traceback.

    The launcher terminates a torchrun that waits whenever the job stops. Forty lines about where it waited would be
    the last ones in the node's log, and hide the error of the script that users look for there.

    `SignalException` and its `sigval`; read in torch 2.8 and 2.15. If it has another name, the traceback is printed.
    """
    print_traceback = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if kind.__name__ != "SignalException":
            print_traceback(kind, error, trace)
            return
        number = getattr(error, "sigval", signal.SIGTERM)
        sys.stderr.write(f"perdure: {signal.Signals(number).name} ended torchrun\n")

    sys.excepthook = report


def process_group_handlers() -> dict[str, Callable[..., Any]]:
    """Returns the functions that `init_process_group` calls, by the scheme of the address; the caller may replace them.

    `torch.distributed.rendezvous._rendezvous_handlers`; read in torch 2.8 and 2.15.

    Raises:
        KeyError: if it is missing. The rank then uses the address in its script.
    """
    # Looked up in sys.modules, since the attribute of this name is a function.
    return sys.modules["torch.distributed.rendezvous"].__dict__["_rendezvous_handlers"]


def plugin_loader() -> Callable[[], None] | None:
    """Returns the function that loads the entry points of `torch.backends`, as the end of `import torch` does.

    `torch._import_device_backends`; read in torch 2.8 and 2.15. Returns None if it is missing: ranks then start cold.
    """
    return getattr(sys.modules["torch"], "_import_device_backends", None)


def _names_restarts(command: Sequence[str]) -> bool:
    names = (word.partition("=")[0] for word in command if word.startswith("--"))
    return any(name.replace("-", "_") == "__max_restarts" for name in names)


def _arguments(record: logging.LogRecord) -> tuple[object, ...]:
    return record.args if isinstance(record.args, tuple) else ()


def _callers() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    for _ in range(_DEEPEST_FRAME):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
