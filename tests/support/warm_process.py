"""Python processes that are forked from an interpreter that has imported what they need.

`python -m perdure.agent` imports for seconds; a forked one begins at once, and is as real: it has its own memory,
environment and session, and is signaled and killed like any other. On macOS, whose frameworks forbid forks without an
exec, it is started cold.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

_REPOSITORY = Path(__file__).parents[2]
_FORKS = sys.platform != "darwin"


class WarmProcess:
    """A process of a warm interpreter, with the methods of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int, ended: int) -> None:
        self.pid = pid
        self._ended = ended
        self._returncode: int | None = None

    @property
    def returncode(self) -> int | None:
        """The exit code of a process that has ended; the number of the signal that ended it, with a minus."""
        if self._returncode is None and self.ends_within(0):
            # An interpreter that was killed has reported nothing.
            self._returncode = int(os.read(self._ended, 16) or -signal.SIGKILL)
            os.close(self._ended)
        return self._returncode

    def ends_within(self, seconds: float) -> bool:
        """Waits for the end of the process, and returns whether it has come."""
        if self._returncode is not None:
            return True
        # Unlike `select`, it takes any descriptor.
        waiting = select.poll()
        waiting.register(self._ended, select.POLLIN)
        return bool(waiting.poll(seconds * 1000))

    async def wait(self) -> int:
        """Returns the exit code once the process has ended."""
        while (code := self.returncode) is None:
            loop, readable = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(self._ended, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(self._ended)
        return code

    def send_signal(self, number: int) -> None:
        """Sends it to a process that still runs."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmInterpreter:
    """An interpreter that has imported some modules, and forks processes that run others; it ends with this process."""

    def __init__(self, *modules: str) -> None:
        self._starts = Lock()
        self.requests, theirs = socket.socketpair()
        with theirs:
            self._pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", __file__, *modules],
                _environment(),
                file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)],
            )

    def start(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str],
        folder: Path | None = None,
        output: int | None = None,
        errors: int | None = None,
    ) -> WarmProcess:
        """Starts `python -m module` in a session of its own; the first call waits until all modules are imported.

        Args:
            module: has been imported, or is imported now.
            arguments: of its command line.
            environment: all variables.
            folder: in which it works; by default this process's own.
            output: a descriptor to write to; by default this process's own.
            errors: likewise.
        """
        begins, ended = os.pipe()
        descriptors = [ended, 1 if output is None else output, 2 if errors is None else errors]
        request = {
            "module": module,
            "arguments": arguments,
            "environment": dict(environment),
            "folder": str(folder or Path.cwd()),
        }
        content = json.dumps(request).encode()
        try:
            with self._starts:
                socket.send_fds(self.requests, [len(content).to_bytes(4, "big")], descriptors)
                self.requests.sendall(content)
                pid = int.from_bytes(_exactly(self.requests, 4), "big")
        finally:
            os.close(ended)
        return WarmProcess(pid, begins)

    def close(self) -> None:
        """Ends the interpreter, and with it no process that it has forked."""
        self.requests.close()
        os.waitpid(self._pid, 0)


def _environment() -> dict[str, str]:
    """Returns the interpreter's environment: without what the test that first needs it has set for itself."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "TEMPORAL_"))}
    return {**own, "PYTHONPATH": str(_REPOSITORY)}


@cache
def warm_interpreter(*modules: str) -> WarmInterpreter:
    """Returns the interpreter that this process shares for these modules."""
    # Not at the top: an interpreter runs this file, too, and its processes have only what they need.
    from tests.support import descriptors

    interpreter = WarmInterpreter(*modules)
    descriptors.keep(interpreter.requests.fileno())
    return interpreter


def _exactly(connection: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        part = connection.recv(count - len(content))
        if not part:
            raise ConnectionResetError("the warm interpreter has ended")
        content += part
    return content


def _serve(modules: Sequence[str]) -> None:
    """Forks a process for each request until the one that asks has ended."""
    requests = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    woken, wakes = socket.socketpair()
    for one in (woken, wakes):
        one.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # A test that is interrupted ends this process by closing its socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in modules if _FORKS else ():
        import_module(module)
    running: dict[int, int] = {}
    while True:
        readable, _, _ = select.select([requests, woken], [], [])
        if woken in readable:
            woken.recv(4096)
            _report_ends(running)
        if requests in readable:
            head, descriptors, _, _ = socket.recv_fds(requests, 4, 3)
            if not head:
                return
            ended, output, errors = descriptors
            request = json.loads(_exactly(requests, int.from_bytes(head, "big")))
            pid = os.fork()
            if pid == 0:
                for one in (requests, woken, wakes):
                    one.close()
                for one in (ended, *running.values()):
                    os.close(one)
                _run(request, output, errors)
            for one in (output, errors):
                os.close(one)
            running[pid] = ended
            requests.sendall(pid.to_bytes(4, "big"))


def _report_ends(running: dict[int, int]) -> None:
    for pid, ended in list(running.items()):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            del running[pid]
            with suppress(BrokenPipeError):
                os.write(ended, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(ended)


def _run(request: dict[str, Any], output: int, errors: int) -> NoReturn:
    """Becomes the process of a request."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        for descriptor, number in ((output, 1), (errors, 2)):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        if not _FORKS:
            command = [sys.executable, "-P", "-m", request["module"], *request["arguments"]]
            os.execve(sys.executable, command, request["environment"])
        sys.argv = [request["module"], *request["arguments"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            sys.stderr.write(f"{left.code}\n")
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1:])
