"""The command's process tree: starts, ends and reaps all processes, and leaves none behind.

The launcher is a subreaper, so all descendants of the command stay below it, including daemons. So the kernel reports
when nothing is left (no child to wait for); beside a companion, a search does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ..system import processes
from ..system.cleaners import Sparing, is_manager, without_cleaners
from ..system.program_signals import any_runs, ends_with_input, signal_program

logger = logging.getLogger(__name__)

_KILL_AGAIN = timedelta(milliseconds=200)
"""Interval of repeated SIGKILLs: a process may have been forking."""
_SEARCH_AGAIN = timedelta(milliseconds=20)
"""Interval of searches for leftovers beside a companion: the kernel reports only the launcher's own children."""
_HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver", b"perdure_launcher")
"""What the command lines of processes contain that do no work of the user's."""
_SHOWN_LEFTOVERS = 5
_UNKILLABLE = timedelta(seconds=15)
"""Time after which a process that survives SIGKILL counts as stuck in the kernel (a GPU, a network file system)."""
_STUCK_LOOK = timedelta(seconds=1)
"""Interval of looks at stuck processes."""

NOT_FOUND = 127
NOT_EXECUTABLE = 126


class CommandFailed(Exception):
    """The command could not be started."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """The exit code that a shell would return."""


@dataclass(frozen=True)
class Exit:
    """A child of the launcher that ended."""

    pid: int
    code: int
    """The exit code; negative for signals."""


class ProcessTree:
    """All processes below the launcher. Use it in the launcher's main thread only: children die with their thread."""

    def __init__(self) -> None:
        self._roots: set[int] = set()
        self._companions: set[int] = set()
        self._empty = True
        self._kill_at: float | None = None
        self._killing_since: float | None = None
        self._terminating = False
        self._signaled: list[int] = []
        """Processes that `terminate` has signaled; cleared when all have ended."""
        self._leftover_grace = timedelta()
        self._stuck: list[processes.Process] = []
        self._sparing = Sparing()

    @property
    def empty(self) -> bool:
        """Whether only companions are left, according to the last `reap`; also true if the rest cannot be killed."""
        return self._empty

    @property
    def stuck(self) -> list[int]:
        """The processes that have survived SIGKILL and still exist: they may hold devices, ports and files. Those that
        the launcher may not signal are not among them."""
        self._stuck = [known for known in self._stuck if processes.is_there(known)]
        return [known.pid for known in self._stuck]

    @property
    def vacant(self) -> bool:
        """Whether nothing of the command is left that could be in the way of new processes."""
        return self._empty and not self.stuck

    @property
    def roots(self) -> frozenset[int]:
        """The running processes that `spawn` started."""
        return frozenset(self._roots)

    @property
    def companions(self) -> frozenset[int]:
        """The running processes that `spawn` started beside the command."""
        return frozenset(self._companions)

    @property
    def ending(self) -> bool:
        return self._terminating or self._killing_since is not None

    def spawn(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        workdir: Path | None,
        output: int,
        pass_fds: Sequence[int] = (),
        companion: bool = False,
    ) -> int:
        """Starts a process in its own session, with stdout and stderr going to `output`.

        A companion runs beside the command, with its children in its own process group: it continues when the command
        ends, until it is dismissed.

        Raises:
            CommandFailed: if the process cannot be started.
        """
        try:
            process = subprocess.Popen(
                command,
                env=env,
                cwd=workdir,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=pass_fds,
                preexec_fn=processes.begin_child,  # noqa: PLW1509 - system calls only
            )
        except OSError as error:
            raise _explain(error, command, env=env, workdir=workdir) from error
        # Only `reap` reaps the process: Popen itself must neither wait for it nor warn.
        process.returncode = 0
        if companion:
            self._companions.add(process.pid)
            return process.pid
        if self._empty:
            self._terminating = False
            self._signaled = []
            self._kill_at = self._killing_since = None
        self._roots.add(process.pid)
        self._empty = False
        return process.pid

    def reap(self) -> list[Exit]:
        """Collects children that ended; call it after each SIGCHLD."""
        ended: list[Exit] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._empty = True
                self._roots.clear()
                self._companions.clear()
                return ended
            if pid == 0:
                break
            self._roots.discard(pid)
            self._companions.discard(pid)
            ended.append(Exit(pid, os.waitstatus_to_exitcode(status)))
        if self._companions and not self._roots and not self._empty:
            self._empty = all(is_manager(process.pid) for process in self._remaining_processes())
        if self._signaled and not any_runs(self._signaled):
            self._signaled = []
            self.terminate_leftovers(self._leftover_grace)
        return ended

    def terminate(self, grace: timedelta, *, leftover_grace: timedelta) -> None:
        """Ends everything: SIGTERM once, SIGKILL after the grace period. A later call can only shorten the period.

        The started programs are signaled, and not their helpers. torchrun forwards the signal to its ranks, which must
        not receive it twice. What outlives the programs has the shorter grace period for leftovers.
        """
        if self._empty:
            return
        if not self._terminating:
            self._terminating = True
            self._leftover_grace = leftover_grace
            self._signaled = [pid for root in self._roots for pid in signal_program(root, signal.SIGTERM)]
        self._kill_after(grace)

    def leftovers(self) -> list[str]:
        """Describes the daemons and orphans that outlived the started processes. Those that end by themselves are left
        out: what reads the output of others, and the helpers of Python's multiprocessing and of Perdure."""
        described: list[str] = []
        for pid in (process.pid for process in self._remaining_processes()):
            if ends_with_input(pid, signal.SIGTERM):
                continue
            program, *arguments = processes.read_file(pid, "cmdline").split(b"\0")
            # The kernel shows no command line of a process that is about to end by itself.
            if program and not any(helper in argument for argument in (program, *arguments) for helper in _HELPERS):
                # Further arguments may hold secrets, and a node's log is read by more people than its processes.
                words = [os.path.basename(program), *(a for a in arguments[:1] if not a.startswith(b"-"))]
                described.append(f"{b' '.join(words).decode(errors='replace')} ({pid})")
        return described

    def orphans(self) -> list[processes.Process]:
        """Returns the processes whose parents have ended, such as jobs that a shell has left in the background."""
        known = self._roots | self._companions
        own = os.getpid()
        return [found for found in self._remaining_processes() if found.parent == own and found.pid not in known]

    def adopt(self, orphan: int) -> None:
        """Takes an orphan for a process that `spawn` started."""
        self._roots.add(orphan)

    def terminate_leftovers(self, grace: timedelta) -> None:
        """Ends daemons and orphans that outlived the started processes: SIGTERM, and SIGKILL after the grace period."""
        if self._empty:
            return
        self._terminating = True
        # A `tee` still has the last lines of the programs before it to write.
        left = without_cleaners(process.pid for process in self._remaining_processes())
        processes.send([pid for pid in left if not ends_with_input(pid, signal.SIGTERM)], signal.SIGTERM)
        self._kill_after(grace)

    def kill(self) -> None:
        """Kills everything at once."""
        if self._empty:
            return
        if self._killing_since is None:
            self._killing_since = time.monotonic()
        left = [process.pid for process in self._remaining_processes()]
        processes.send(self._sparing.choose(left), signal.SIGKILL)

    def dismiss(self) -> None:
        """Ends the companions, and waits for their end."""
        processes.send_to_groups(self._companions, signal.SIGKILL)
        for companion in self._companions:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(companion, 0)
        self._companions.clear()

    def _remaining_processes(self) -> list[processes.Process]:
        """Returns the remaining processes of the command, without zombies."""
        return [
            process
            for process in processes.descendants()
            if not process.zombie and process.group not in self._companions
        ]

    def _kill_after(self, grace: timedelta) -> None:
        deadline = time.monotonic() + grace.total_seconds()
        self._kill_at = deadline if self._kill_at is None else min(self._kill_at, deadline)

    @property
    def next_step(self) -> float | None:
        """The monotonic time at which `advance` has something to do."""
        if self._empty:
            return time.monotonic() + _STUCK_LOOK.total_seconds() if self._stuck else None
        if self._companions and not self._roots:
            return time.monotonic() + _SEARCH_AGAIN.total_seconds()
        if self._killing_since is not None:
            return time.monotonic() + _KILL_AGAIN.total_seconds()
        return self._kill_at

    def advance(self) -> None:
        """Takes the actions that are due."""
        if self._empty:
            return
        now = time.monotonic()
        if self._killing_since is not None:
            if now - self._killing_since > _UNKILLABLE.total_seconds():
                left = self._remaining_processes()
                logger.error("processes %s survive SIGKILL", [process.pid for process in left])
                self._stuck = [process for process in left if not processes.is_protected(process.pid)]
                self._empty = True
                return
            self.kill()
        elif self._kill_at is not None and now >= self._kill_at:
            self.kill()


def explain_leftovers(left: Sequence[str]) -> str:
    """Returns what users read of processes that are ended because the command has ended with 0."""
    shown = ", ".join(left[:_SHOWN_LEFTOVERS]) + (" and others" if len(left) > _SHOWN_LEFTOVERS else "")
    return (
        f"the command has ended with 0, and leaves processes behind, which are ended now: {shown}. "
        "If their work is a part of the job, let the command wait for them"
    )


def explain_stuck(stuck: Sequence[int]) -> str:
    """Returns what users read of processes beside which nothing is started."""
    return (
        f"processes {', '.join(map(str, stuck))} survive SIGKILL and may hold devices, ports and files: nothing is "
        "started until they have ended. They wait in the kernel for a device or a network file system"
    )


def _explain(error: OSError, command: Sequence[str], *, env: Mapping[str, str], workdir: Path | None) -> CommandFailed:
    program = command[0]
    if workdir is not None and not workdir.is_dir():
        return CommandFailed(NOT_EXECUTABLE, f"workdir: {workdir} does not exist on this node, or is not a folder")
    if isinstance(error, FileNotFoundError):
        where = f"in PATH={env.get('PATH', os.defpath)}" if "/" not in program else f"from {workdir or Path.cwd()}"
        return CommandFailed(
            NOT_FOUND,
            f"command not found: {program!r} (looked {where}); check its spelling, and that the node's image has it "
            "(a script also needs the interpreter that its first line names)",
        )
    if isinstance(error, PermissionError):
        return CommandFailed(
            NOT_EXECUTABLE, f"command not executable: {program!r}; use chmod +x, or name its interpreter first"
        )
    return CommandFailed(NOT_EXECUTABLE, f"command {program!r} cannot be started: {error}")
