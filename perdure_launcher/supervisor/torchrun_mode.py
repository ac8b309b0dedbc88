"""Mode for commands that start torchrun, which starts the ranks; the launcher makes torchrun run and end cleanly."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from perdure_training.node_api.bodies import CommandExit, Desired
from perdure_training.node_api.layout import RANK_EXITS
from perdure_training.node_api.text import well_formed

from ..environment import expected_environment, torchrun_environment
from ..rank_exits import SUPERSEDED_EXIT_CODE, ExitSpool, describe_status, split_status
from ..state import RendezvousState
from ..system import processes
from ..system.program_signals import ends_with_input
from ..warm_start.names import EXECUTABLE_VARIABLE
from ..warm_start.plan import Plan
from ..warm_start.supervisor import InterpreterSupervisor
from .capture import Output
from .commands import BACKEND, begins_with_torchrun, expected_ranks
from .node import NodeResources
from .process_tree import CommandFailed, Exit, explain_leftovers

logger = logging.getLogger(__name__)

_DRAIN = timedelta(seconds=1)
_BEGINS = timedelta(seconds=1)
"""The time in which a process that a shell has put into the background begins its program, at most."""
_LOOK_AGAIN = 0.02
_CONTINUES = (
    "the command has ended with 0, and has left torchrun in the background (process {pid}): the node continues until "
    "that process ends, and its exit code counts"
)
_REFUSED = re.compile(r"\bRendezvousError: (?P<reason>.+)")
"""The last line of torchrun's output, in which our rendezvous says why it cannot continue."""
_NOT_REGISTERED = f"rendezvous backend '{BACKEND}' is not registered"
_NOT_REGISTERED_EXPLAINED = (
    "torchrun does not find Perdure's rendezvous plugin: PYTHONPATH was overwritten between the launcher and torchrun "
    "(in the image, a wrapper script, or by python -I or -E); add to PYTHONPATH instead of replacing it"
)


@dataclass(kw_only=True)
class _Attempt:
    root: int
    output: Output
    started_at: float
    out_of_memory_kills: int
    code: int | None = None
    ended_at: float = 0.0


class TorchrunMode:
    """Runs the command once per attempt."""

    name = "torchrun"

    def __init__(self, node: NodeResources) -> None:
        self._node = node
        self._command = node.config.command
        self._environment = torchrun_environment(node.config, node.environment, processes=node.processes)
        self._spool = ExitSpool(node.config.errors / RANK_EXITS)
        self._warm = self._expected_interpreter()
        self._current: _Attempt | None = None
        self.attempt = 0

    def begin(self) -> None:
        """Starts the first attempt at once: its imports take seconds, and it trains nothing before it has a world."""
        self._start(1)

    def follow(self, desired: Desired) -> None:
        tree, config = self._node.tree, self._node.config
        if self._current is not None:
            if tree.ending or self._current.code is not None:
                return
            if not desired.run and desired.attempt >= self.attempt:
                tree.terminate(config.termination_grace, leftover_grace=config.stop_grace)
            elif desired.run and desired.attempt > self.attempt:
                tree.terminate(config.stop_grace, leftover_grace=config.stop_grace)
        elif tree.vacant and desired.run and desired.attempt > self.attempt:
            self._start(desired.attempt)

    def observe(self, exits: list[Exit]) -> None:
        current, tree = self._current, self._node.tree
        for ended in exits:
            if current is None or ended.pid != current.root:
                continue
            current.code, current.ended_at = ended.code, time.time()
            if tree.empty or tree.ending:
                continue
            if ended.code == 0 and (continued := self._torchrun_in_background()):
                current.root, current.code = continued, None
                tree.adopt(continued)
                _note(current.output, _CONTINUES.format(pid=continued))
            elif ended.code == 0:
                if left := tree.leftovers():
                    _note(current.output, explain_leftovers(left))
                tree.terminate_leftovers(self._node.config.stop_grace)
            else:
                # Without torchrun the ranks would continue alone, and write to files that their successors read.
                tree.kill()

    def _torchrun_in_background(self) -> int | None:
        """Returns the process with the torchrun that a command has left behind, as `nohup torchrun … &` in a script
        does; None if there is none."""
        deadline = time.monotonic() + _BEGINS.total_seconds()
        while True:
            orphans = self._node.tree.orphans()
            for orphan in orphans:
                programs = (orphan, *processes.descendants(orphan.pid))
                if any(begins_with_torchrun(processes.command_of(program.pid)) for program in programs):
                    return orphan.pid
            # What a shell has just put into the background still shows the shell's command line.
            begins = any(not one.executed and not ends_with_input(one.pid, signal.SIGTERM) for one in orphans)
            if self._node.state.read().handler_pid or not begins or time.monotonic() >= deadline:
                return None
            time.sleep(_LOOK_AGAIN)

    def settle(self) -> None:
        current = self._current
        if current is None:
            return
        self._current = None
        code = -9 if current.code is None else current.code
        current.output.drain(_DRAIN)
        message = ""
        if _NOT_REGISTERED in current.output.tail:
            message = _NOT_REGISTERED_EXPLAINED
            _note(current.output, message)
        elif code and (refused := _REFUSED.search(current.output.tail)):
            message = refused["reason"]
        exit_code, signal_number = split_status(code)
        logger.info("attempt %s ended with %s", self.attempt, describe_status(exit_code, signal_number))
        memory = self._node.memory
        killed = memory.out_of_memory_kills > current.out_of_memory_kills
        self._node.outbox.post(
            "/v1/launcher/exited",
            CommandExit(
                attempt=self.attempt,
                generation=self._node.state.read().generation,
                exit_code=exit_code,
                signal=signal_number,
                ranks=self._spool.read(started_after=current.started_at),
                log_tail=current.output.tail,
                out_of_memory=killed,
                memory_limit=memory.limit_bytes if killed else None,
                time=current.ended_at or time.time(),
                superseded=code == SUPERSEDED_EXIT_CODE,
                message=message,
            ),
        )

    def explain(self, text: str) -> None:
        if self._current is not None:
            _note(self._current.output, text)

    def _start(self, attempt: int) -> None:
        node = self._node
        self.attempt = attempt
        # Every start of the command begins with its first torchrun.
        node.state.write(RendezvousState(generation=node.state.read().generation))
        output = node.capture.open()
        kills, started_at = node.memory.out_of_memory_kills, time.time()
        try:
            root = node.tree.spawn(self._command, env=self._environment, workdir=node.workdir, output=output.write_end)
        except CommandFailed as failed:
            logger.error("%s", failed)
            _note(output, str(failed))
            output.close_write_end()
            node.outbox.post("/v1/launcher/exited", not_started(attempt, failed, output))
            return
        output.close_write_end()
        if self._warm is not None:
            self._warm.ensure()
        logger.info("attempt %s started as process %s", attempt, root)
        self._current = _Attempt(root=root, output=output, started_at=started_at, out_of_memory_kills=kills)

    def _expected_interpreter(self) -> InterpreterSupervisor | None:
        """Returns a supervisor for the ranks that torchrun will probably start, so that their interpreter can import
        modules while torchrun itself still imports."""
        node, environment = self._node, self._environment
        if not node.config.warm_starts or EXECUTABLE_VARIABLE in environment:
            return None
        workdir = node.workdir or Path.cwd()
        expected = expected_ranks(self._command, path=environment.get("PATH", os.defpath), workdir=workdir)
        if expected is None:
            return None
        ranks = expected_environment(environment, processes=expected.processes or node.processes)
        return node.interpreter_supervisor(expected.python, Plan.of_ranks(expected.arguments, ranks))


def not_started(attempt: int, failed: CommandFailed, output: Output) -> CommandExit:
    """Returns the report of a command that could not be started."""
    return CommandExit(
        attempt=attempt, exit_code=failed.exit_code, log_tail=output.tail, time=time.time(), message=str(failed)
    )


def _note(output: Output, text: str) -> None:
    output.note(f"perdure: {well_formed(text)}\n".encode())
