"""Supervises the command: keeps it in the state that the agent desires, and leaves no process behind.

One thread does everything that touches processes (they die with the thread that started them); other threads only send
it events. Without work it sleeps: the kernel wakes it when a child ends, a feed when the desired state changes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from perdure_training.node_api import layout
from perdure_training.node_api.bodies import (
    CheckRequest,
    ChecksReport,
    Desired,
    LauncherHello,
    LeavingReport,
    StacksReport,
    UnmanagedReport,
)
from perdure_training.node_api.storage_link import StorageLink
from perdure_training.secret_texts import command_without_secrets
from perdure_training.snapshots.copies import CopyReceiver

from .. import old_ranks
from ..agent_link.desired_state import NOTHING_DESIRED, DesiredFeed
from ..agent_link.session import AgentSession, Outbox
from ..config import LauncherConfig
from ..environment import COPIES_VARIABLE, MEMORY_ORIGIN_VARIABLE, MEMORY_VARIABLE, base_environment, inject
from ..probes import checks, stacks
from ..state import StateFile
from ..system import processes
from ..system.cgroups import MemoryController
from ..system.cleaners import Sparing, without_cleaners
from ..system.files import write_file
from ..system.memory_folder import COPIES_PREFIX, DELETE_INTERVAL, MEMORY_PREFIX, MemoryFolder, delete_abandoned
from ..system.nvml import Devices
from ..system.ports import PortPool
from ..system.usage import UsageMeter, processes_per_node
from ..system.user_signals import REQUESTS, Passing, send_to_handlers
from ..unmanaged_training import in_node
from ..watched_folder import WatchedFolder, folder_of
from .capture import Capture
from .commands import begins_with_torchrun, starts_torchrun
from .env_mode import EnvMode
from .node import Mode, NodeResources
from .process_tree import ProcessTree, explain_stuck
from .signals import SignalFeed
from .torchrun_mode import TorchrunMode

logger = logging.getLogger(__name__)

USAGE_INTERVAL = timedelta(seconds=10)
GUARD_INTERVAL = timedelta(seconds=1)
"""Interval of searches for ranks outside of our rendezvous, until a handler is seen."""
LAST_REPORT_TIMEOUT = timedelta(seconds=10)
"""Time for which a leaving launcher waits until the agent has received its last report."""
SHORT_LAST_REPORT_TIMEOUT = timedelta(seconds=3)
"""The same after a signal: the party that ends the node has probably ended the agent, too, and waits."""
LAST_COPY = timedelta(seconds=5)
"""The shortest time in which what the script has saved at its end is copied."""
_KILL_AGAIN = timedelta(milliseconds=200)
_LOG_FLUSH = timedelta(seconds=2)
_USAGE = "/v1/launcher/usage"


@dataclass(frozen=True)
class Leaving:
    """The reason for which the launcher ends."""

    exit_code: int
    reason: str
    signal: int | None = None


@dataclass(frozen=True)
class _Signal:
    number: int


@dataclass(frozen=True)
class _Wake:
    """The state of the mode has changed."""


_Event = Desired | in_node.UnmanagedRanks | _Signal | _Wake


class Launcher:
    """The supervisor of one node."""

    def __init__(self, config: LauncherConfig) -> None:
        """Prepares the run directory and all parts that do not need the agent.

        Raises:
            OSError: if the run directory cannot be written.
        """
        self._config = config
        for directory in layout.folders(config.run_directory):
            directory.mkdir(parents=True, exist_ok=True)
        self._devices = Devices()
        self._memory = MemoryController()
        self._state = StateFile(config.run_directory)
        self._state.create()
        self._tree = ProcessTree()
        self._capture = Capture(logs=config.logs, max_bytes=config.log_max_bytes, stdout=config.stdout)
        self._processes = processes_per_node(config.processes, self._devices, {**os.environ, **config.env})
        self._session = AgentSession(
            socket_path=config.socket,
            hello_path="/v1/launcher/hello",
            hello=self._hello,
            on_return=self._agent_returned,
        )
        self._outbox = Outbox(self._session)
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._feed = DesiredFeed(self._session, on_change=self._events.put)
        environment = base_environment(config, inject(config.run_directory), os.environ)
        self._memory_folder = _memory_folder()
        self._copies: CopyReceiver | None = None
        if self._memory_folder is not None:
            environment[MEMORY_VARIABLE] = str(self._memory_folder.path)
            environment[MEMORY_ORIGIN_VARIABLE] = self._memory_folder.origin
            self._copies = _copy_receiver(config, self._memory_folder.path)
            if self._copies is not None:
                environment[COPIES_VARIABLE] = self._copies.address.dump()
        self._watched = (
            WatchedFolder(
                folder_of(config.watch, environment),
                StorageLink(config.run_directory),
                on_restored=lambda: self._events.put(_Wake()),
                report=lambda body: self._outbox.post("/v1/launcher/restoring", body),
            )
            if config.watch
            else None
        )
        self._begun = False
        node = NodeResources(
            config=config,
            environment=environment,
            processes=self._processes,
            tree=self._tree,
            capture=self._capture,
            outbox=self._outbox,
            memory=self._memory,
            state=self._state,
            wake=lambda: self._events.put(_Wake()),
        )
        self._mode: Mode = TorchrunMode(node) if _uses_torchrun(config) else EnvMode(node)
        self._desired = NOTHING_DESIRED
        self._scanner = in_node.ProcessScanner(torchrun=self._mode.name == "torchrun", several=config.max_nodes > 1)
        self._leaving: Leaving | None = None
        self._leaving_grace = config.termination_grace
        self._terminate_at = 0.0
        """The monotonic time until which a command that is to end may train on."""
        self._leave_by = 0.0
        """The monotonic time when the grace period of the command ends, once it is being ended for good."""
        self._stopped_generation = 0
        self._stacks_requested = 0
        self._checks_requested = 0
        self._stop_at: float | None = None
        self._sparing = Sparing()
        self._passing = Passing(self._pass_on)
        self._done = threading.Event()

    def run(self) -> Leaving:
        """Supervises the command until the agent or a signal requests the end; then no process of the command is
        left."""
        processes.become_subreaper()
        SignalFeed(
            (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, *REQUESTS, *REQUESTS.values()),
            on_signal=lambda number: self._events.put(_Signal(number)),
        ).listen()
        # The terminal that started a detached node may close. Not SIG_IGN, which the command would inherit.
        signal.signal(signal.SIGHUP, lambda number, _: None)
        self._capture.start()
        if self._watched is not None:
            self._watched.start()
        else:
            self._begin()
        self._feed.start()
        self._outbox.start()
        threading.Thread(target=self._observe, name="observer", daemon=True).start()
        command = " ".join(command_without_secrets(self._config.command))
        logger.info("launcher %s runs in %s mode: %s", os.getpid(), self._mode.name, command)
        try:
            while not (self._leaving and self._tree.empty):
                self._wait()
                self._step()
        finally:
            self._end_everything()
            if self._watched is not None:
                self._watched.close(within=max(self._leave_by - time.monotonic(), LAST_COPY.total_seconds()))
            if self._copies is not None:
                self._copies.close()
            if self._memory_folder is not None:
                self._memory_folder.remove()
        self._done.set()
        patience = LAST_REPORT_TIMEOUT if self._leaving.signal is None else SHORT_LAST_REPORT_TIMEOUT
        if not self._outbox.flush(patience):
            logger.warning("the agent did not take the last report within %s", patience)
        self._capture.flush(_LOG_FLUSH)
        self._session.close()
        return self._leaving

    def _begin(self) -> None:
        self._begun = True
        self._mode.begin()

    def _wait(self) -> None:
        """Sleeps until an event arrives or an action is due."""
        saving = self._terminate_at if self._terminate_at > time.monotonic() else None
        moments = (self._tree.next_step, self._stop_at, self._passing.next_step, saving)
        due = [moment for moment in moments if moment is not None]
        timeout = max(0.0, min(due) - time.monotonic()) if due else None
        with contextlib.suppress(queue.Empty):
            event = self._events.get(timeout=timeout)
            while True:
                self._handle_event(event)
                event = self._events.get_nowait()

    def _handle_event(self, event: _Event) -> None:
        if isinstance(event, Desired):
            self._desire(event)
        elif isinstance(event, in_node.UnmanagedRanks):
            self._stop_unmanaged(event)
        elif isinstance(event, _Signal) and self._passing.take(event.number, now=time.monotonic()):
            pass
        elif isinstance(event, _Signal) and event.number != signal.SIGCHLD and self._leaving is None:
            name = signal.Signals(event.number).name
            self._leaving = Leaving(128 + event.number, f"the launcher received {name}", event.number)
            saves = min(self._config.save_grace, self._config.termination_grace)
            self._terminate_at = time.monotonic() + saves.total_seconds()
            self._leaving_grace = self._config.termination_grace - saves
            # Every process that ends from now on ends because its node does.
            self._outbox.post("/v1/launcher/leaving", LeavingReport(reason=self._leaving.reason))

    def _desire(self, desired: Desired) -> None:
        self._desired = desired
        if desired.exit:
            self._leaving = self._leaving or Leaving(0, desired.reason or "the agent requested it")
            self._terminate_at = 0.0
            if desired.exit_grace_s is not None:
                self._leaving_grace = timedelta(seconds=desired.exit_grace_s)
        if desired.stop_generation > self._stopped_generation:
            self._stopped_generation = desired.stop_generation
            self._stop_at = time.monotonic() + self._config.stop_grace.total_seconds()
            processes.send(without_cleaners(self._leftover_daemons()), signal.SIGTERM)
        if desired.stacks != self._stacks_requested:
            self._stacks_requested = desired.stacks
            threading.Thread(target=self._report_stacks, args=(desired,), name="stacks", daemon=True).start()
        if desired.checks is not None and desired.checks.number != self._checks_requested:
            self._checks_requested = desired.checks.number
            threading.Thread(target=self._report_checks, args=(desired.checks,), name="checks", daemon=True).start()

    def _pass_on(self, number: signal.Signals) -> None:
        handler = self._state.read().handler_pid
        ours = (*self._tree.companions, *([handler] if handler else ()))
        sent = send_to_handlers(number, looked_through=ours, represented=self._config.run_directory / layout.WARM)
        logger.info("%s is passed on to %s", number.name, sent or "nobody: no program of the command handles it")

    def _report_stacks(self, desired: Desired) -> None:
        ranks = stacks.collect(self._config.run_directory, by_signal=desired.stacks_by_signal)
        self._outbox.post("/v1/launcher/stacks", StacksReport(request=desired.stacks, ranks=ranks))

    def _report_checks(self, request: CheckRequest) -> None:
        figures = checks.run(self._config, request, {**os.environ, **self._config.env})
        self._outbox.post("/v1/launcher/checks", ChecksReport(request=request.number, figures=figures))

    def _step(self) -> None:
        self._mode.observe(self._tree.reap())
        was_empty = self._tree.empty
        self._tree.advance()
        if not was_empty and (stuck := self._tree.stuck):
            self._mode.explain(explain_stuck(stuck))
        self._passing.advance(now=time.monotonic())
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            # By now torchrun has sent SIGTERM to its ranks, and waits for those that ignore it.
            left = [process.pid for process in self._old_ranks()]
            processes.send(self._sparing.choose(left), signal.SIGKILL)
            # Search again for processes that were just forked.
            self._stop_at = time.monotonic() + _KILL_AGAIN.total_seconds() if left else None
        if self._tree.empty:
            self._mode.settle()
        if self._leaving is not None and time.monotonic() >= self._terminate_at:
            if not self._leave_by:
                self._leave_by = time.monotonic() + self._leaving_grace.total_seconds()
            self._tree.terminate(self._leaving_grace, leftover_grace=self._config.stop_grace)
        elif self._begun:
            self._mode.follow(self._desired)
        elif self._watched is not None and self._watched.restored:
            self._begin()
            self._mode.follow(self._desired)

    def _leftover_daemons(self) -> list[int]:
        """Returns daemons of ended ranks: no other process ends them, and new ranks may need their ports."""
        own, roots = os.getpid(), self._tree.roots
        return [process.pid for process in self._old_ranks() if process.parent == own and process.pid not in roots]

    def _old_ranks(self) -> list[processes.Process]:
        return old_ranks.of_generations_up_to(self._stopped_generation, run_directory=self._config.run_directory)

    def _stop_unmanaged(self, unmanaged: in_node.UnmanagedRanks) -> None:
        if self._state.read().handler_pid:
            return
        logger.error("%s (processes %s)", unmanaged.explanation, unmanaged.processes)
        self._mode.explain(unmanaged.explanation)
        self._outbox.post(
            "/v1/launcher/unmanaged", UnmanagedReport(ranks=tuple(unmanaged.processes), detail=unmanaged.explanation)
        )
        if unmanaged.gently:
            self._tree.terminate(self._config.stop_grace, leftover_grace=self._config.stop_grace)
        else:
            self._tree.kill()

    def _end_everything(self) -> None:
        """Kills all remaining processes, also after an internal error: they would continue unsupervised."""
        while not self._tree.empty:
            self._tree.kill()
            time.sleep(0.01)
            self._mode.observe(self._tree.reap())
            self._tree.advance()
        self._mode.settle()
        self._tree.dismiss()

    def _observe(self) -> None:
        """Runs the observer thread: reports usage, searches for unmanaged ranks (of torchrun, until it has a
        handler), deletes memory folders that were abandoned for long, and makes the own one again if it is gone.

        The only process of the only node may legitimately start a torchrun of its own, which is looked through.
        """
        meter = UsageMeter(memory=self._memory, devices=self._devices)
        several = self._config.max_nodes > 1 or self._processes > 1
        torchrun = self._mode.name == "torchrun"
        usage_at = 0.0
        delete_at = time.monotonic() + DELETE_INTERVAL.total_seconds()
        while True:
            if time.monotonic() >= delete_at:
                delete_at = time.monotonic() + DELETE_INTERVAL.total_seconds()
                _delete_abandoned()
            due = time.monotonic() >= usage_at
            searching = torchrun and not self._state.read().handler_pid
            if (searching or (several and not torchrun and due)) and (unmanaged := self._scanner.scan()):
                self._events.put(unmanaged)
            if due:
                usage_at = time.monotonic() + USAGE_INTERVAL.total_seconds()
                self._renew_memory_folder()
                usage = meter.read()
                if not self._outbox.holds(_USAGE):
                    self._outbox.post(_USAGE, usage)
            pause = usage_at - time.monotonic()
            if self._done.wait(max(0.0, min(pause, GUARD_INTERVAL.total_seconds()) if searching else pause)):
                return

    def _renew_memory_folder(self) -> None:
        if self._memory_folder is None:
            return
        try:
            self._memory_folder.renew()
        except OSError as error:
            logger.warning("ranks can keep no snapshots in memory, which is tried again: %s", error)

    def _hello(self) -> LauncherHello:
        return LauncherHello(
            pid=os.getpid(),
            attempt=self._mode.attempt,
            mode=self._mode.name,
            script=self._mode.name == TorchrunMode.name and not begins_with_torchrun(self._config.command),
            processes=self._processes,
        )

    def _agent_returned(self) -> None:
        self._feed.forget()
        if isinstance(self._mode, EnvMode):
            self._mode.report_ready_again()


def write_exit_file(run_directory: Path, leaving: Leaving) -> None:
    """Records how the launcher ended, for processes that are not its parent. Errors are ignored, as the disk may be
    full."""
    path = run_directory / layout.EXIT
    content = {
        "exit_code": leaving.exit_code,
        "signal": leaving.signal,
        "time": time.time(),
        "reason": leaving.reason,
    }
    try:
        write_file(path, json.dumps(content), durable=True)
    except OSError as error:
        logger.error("%s cannot be written: %s", path, error)


def _memory_folder() -> MemoryFolder | None:
    try:
        folder = MemoryFolder(node=_own_node())
        _delete_abandoned()
        return folder
    except OSError as error:
        logger.warning("ranks can keep no snapshots in memory: %s", error)
        return None


def _own_node() -> str:
    """The job's UID with the node's role and rank."""
    return os.environ.get("PERDURE_NODE", "").rpartition("/")[0]


def _delete_abandoned() -> None:
    """Gives back the memory of launchers that were killed, and of agents: they were killed with their nodes."""
    for prefix in (MEMORY_PREFIX, COPIES_PREFIX):
        delete_abandoned(node=_own_node(), prefix=prefix)


def _copy_receiver(config: LauncherConfig, folder: Path) -> CopyReceiver | None:
    if config.max_nodes == 1:
        return None
    # The stores of worlds take allowed ports in turn from the first one on.
    pool = PortPool(config.address, listening=True, allowed=config.store_ports, start=-1, size=1)
    try:
        return CopyReceiver(folder, pool.take(pool.numbers[0]), host=config.address)
    except (OSError, IndexError):
        logger.warning("no other node can keep copies of its snapshots here: %s", pool.problem)
        return None


def _uses_torchrun(config: LauncherConfig) -> bool:
    if config.rendezvous == "auto":
        return starts_torchrun(config.command, workdir=config.workdir or Path.cwd())
    return config.rendezvous == "torchrun"
