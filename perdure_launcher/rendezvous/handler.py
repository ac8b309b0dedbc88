"""torchrun's rendezvous handler, controlled by the job: worlds come from the agent, and no node waits for another one.

torchrun calls `num_nodes_waiting()` ten times a second, and restarts its ranks when it returns 1; `next_rendezvous()`
then returns the world that is already available. While the agent is away, ranks continue to train, and waiting
torchruns continue to wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.elastic.rendezvous.api import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from perdure_training.node_api import layout
from perdure_training.node_api.addresses import host_and_port
from perdure_training.node_api.bodies import (
    EnteredReport,
    FinishedReport,
    HandlerHello,
    RankExit,
    ReadyReport,
    SupersededReport,
    World,
)
from perdure_training.node_api.progress_file import steps
from perdure_training.node_api.rank_environment import ROLES_VARIABLE

from .. import old_ranks
from ..agent_link.session import AgentSession, Outbox
from ..environment import STORE_VARIABLE, TorchrunSettings, generation_environment
from ..rank_exits import SUPERSEDED_EXIT_CODE, ExitSpool, ExitWatch
from ..state import RendezvousState, StateFile
from ..system.cgroups import MemoryController
from ..system.ports import PortPool
from ..torch_internals import detach_from_flags, serve_store
from ..unmanaged_training.cases import Case
from ..unmanaged_training.in_rank import stop
from ..warm_start.supervisor import PREPARATION, InterpreterSupervisor
from .store import WorldStore
from .world_feed import WorldFeed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

logger = logging.getLogger(__name__)

_READY = "/v1/rendezvous/ready"
_PREDECESSOR_ENDS = timedelta(seconds=5)
"""Time for which a torchrun waits for one that a script has ended."""
_LOOK_AGAIN = 0.1
"""Seconds between two looks at that."""
_LAST_REPORT = timedelta(seconds=10)
"""Time for which a torchrun without ranks waits until the agent has received its report."""
_COMMAND_ENDS = timedelta(seconds=30)
"""Time for which torchrun waits for the launcher to end a superseded command; only older agents do not request that."""


class PerdureRendezvous(RendezvousHandler):
    """The rendezvous handler of one torchrun in the job."""

    def __init__(
        self,
        parameters: RendezvousParameters,
        settings: TorchrunSettings,
        *,
        processes: int,
        warm: InterpreterSupervisor | None,
    ) -> None:
        """Creates the handler; it sends nothing to the agent before the first rendezvous.

        Args:
            parameters: torchrun's parameters, from its flags and environment.
            settings: The launcher's settings, from the job.
            processes: The number of ranks that this torchrun starts.
            warm: The supervisor of the warm interpreter; None if ranks start cold.

        Raises:
            UnmanagedTrainingError: if another torchrun of the command runs.
        """
        run_directory = Path(settings.run_directory)
        self._place = _take_place(run_directory)
        self._parameters = parameters
        self._settings = settings
        self._processes = processes
        self._warm = warm
        self._state = StateFile(run_directory)
        known = self._state.read()
        self._entered, self._stage = known.generation, known.stage
        self._launch = zlib.crc32("\0".join(sys.argv).encode(errors="replace"))
        self._refused = _another_torchrun(known, self._launch)
        self._world: World | None = None
        self._waiting_since: int | None = None
        self._progress = run_directory / layout.PROGRESS
        self._spool = ExitSpool(run_directory / layout.ERRORS / layout.RANK_EXITS)
        self._memory = MemoryController()
        self._out_of_memory_kills = self._memory.out_of_memory_kills
        self._ports = PortPool(settings.address, listening=True, allowed=settings.allowed_ports, start=self._entered)
        self._stores: dict[int, TCPStore] = {}
        self._storing = threading.Lock()
        self._finishing = False
        self._session = AgentSession(
            socket_path=run_directory / layout.AGENT_SOCKET,
            hello_path="/v1/rendezvous/hello",
            hello=self._hello,
            on_return=self._report_ready_again,
        )
        self._outbox = Outbox(self._session)
        self._feed = WorldFeed(self._session, after=self._entered, stage=self._stage, prepare=self._prepare)
        self._exits = ExitWatch(
            stop_grace=timedelta(seconds=settings.stop_grace_s),
            warm_folder=settings.warm_folder,
            on_exits=self._spool.write,
        )
        self._state.write(replace(known, handler_pid=os.getpid()))
        self._exits.install()
        if warm is not None:
            warm.ensure()
        self._feed.start()
        self._outbox.start()

    def get_backend(self) -> str:
        """Returns the name that torchrun requested, since torchrun verifies it."""
        return self._parameters.backend

    def get_run_id(self) -> str:
        """Returns the run ID. It names torchrun's log folder, so it contains no slashes."""
        return self._settings.run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks connect to an existing store: the generation's; no rank opens one."""
        return True

    def is_closed(self) -> bool:
        """Returns False: a single node does not decide whether the job continues."""
        return False

    def set_closed(self) -> None:
        """Does nothing: a single node does not end the job."""

    def num_nodes_waiting(self) -> int:
        """Returns 1 if torchrun must restart its ranks: there is a newer world, or there will be none. Called every 0.1
        s."""
        if self._warm is not None:
            self._warm.follow_ranks(self._first_rank_steps)
        return 1 if self._feed.stage_is_complete or self._feed.newer_than(self._entered) else 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns the newest world, and waits for one if necessary.

        Raises:
            RendezvousError: if this node has no free port for the world's store, or if the previous torchrun failed and
                had another command line.
            SystemExit: with 0 if the job has finished this stage: torchrun ends with success, and the command
                continues.
        """
        if self._refused:
            raise RendezvousError(self._refused)
        detach_from_flags(self)
        exits = self._exits.take()
        killed = {exit.pid for exit in exits if exit.signal == signal.SIGKILL and exit.pid is not None}
        while True:
            world = None if self._feed.stage_is_complete else self._feed.newer_than(self._entered)
            if world is None or exits:
                self._ports.replenish()
                if world is None and (problem := self._ports.problem):
                    raise RendezvousError(problem)
                if world is None and self._world is None:
                    self._prepare_to_join()
                self._report_ready(self._with_reason(exits) if world is None else exits)
                exits = []
            if world is None:
                self._waiting_since = self._entered
                world = self._feed.wait_newer(self._entered)
                self._waiting_since = None
                if world is None:
                    raise self._leave_completed_stage()
            if failure := self._open_store(world):
                self._entered = world.generation
                exits = [failure]
                continue
            self._end_old_ranks(killed)
            return self._enter(world)

    def shutdown(self) -> bool:
        """Closes all connections when torchrun ends, with success or not; the job continues."""
        self._session.close()
        self._ports.close()
        if self._warm is not None:
            self._warm.close()
        return True

    def _end_old_ranks(self, killed: Collection[int]) -> None:
        """Waits until nothing is left of the ranks before: it may hold ports, devices and files of the next ones."""
        if self._world is None or self._settings.launcher_pid is None:
            return
        left = old_ranks.end(
            self._entered,
            run_directory=self._progress.parent,
            launcher=self._settings.launcher_pid,
            killed=killed,
            grace=timedelta(seconds=self._settings.stop_grace_s),
        )
        if left:
            logger.warning("processes %s of earlier ranks cannot be ended", [process.pid for process in left])

    def _enter(self, world: World) -> RendezvousInfo:
        with self._storing:
            for generation in [old for old in self._stores if old < world.generation]:
                # The last reference to a store keeps its threads and its port.
                del self._stores[generation]
        self._world = world
        self._entered = world.generation
        if self._warm is not None:
            self._warm.start_ranks()
        self._exits.base_rank = world.base_rank
        self._out_of_memory_kills = self._memory.out_of_memory_kills
        self._state.write(
            RendezvousState(
                handler_pid=os.getpid(), generation=world.generation, stage=self._stage, launch=self._launch
            )
        )
        # Ranks inherit this process's environment, also what it has of an earlier world.
        os.environ.pop(ROLES_VARIABLE, None)
        os.environ.update(
            generation_environment(
                world,
                progress=self._progress,
                run_id=self._settings.run_id,
                parent=os.getpid(),
                stage=self._stage,
            )
        )
        os.environ[STORE_VARIABLE] = host_and_port(world.store_address, world.store_port)
        # torchrun itself sets only GROUP_RANK; scripts of other systems read the same number as NODE_RANK.
        os.environ["NODE_RANK"] = str(world.group_rank)
        self._ports.keep_clear_of(world.store_port)
        self._ports.replenish()
        self._outbox.post(
            "/v1/rendezvous/entered",
            EnteredReport(generation=world.generation, time=time.time(), store_ports=tuple(self._ports.numbers)),
        )
        store = WorldStore(world, exit_barrier=lambda: self._exit_barrier(world.generation))
        return RendezvousInfo(
            cast(Any, store),
            world.group_rank,
            world.nodes,
            RendezvousStoreInfo(world.store_address, world.store_port),
        )

    def _exit_barrier(self, generation: int) -> None:
        """Reports that all local ranks ended with 0, and waits for the other nodes' ranks.

        Raises:
            SystemExit: if the generation is over before all have finished: torchrun cannot restart ranks from
                    here, but the launcher can restart torchrun.
        """
        self._finishing = True
        self._outbox.post("/v1/rendezvous/finished", FinishedReport(generation=generation, time=time.time()))
        if self._feed.wait_complete(generation):
            self._leave_stage()
            return
        logger.warning("generation %s is over before all its ranks have finished; starting again", generation)
        if os.getsid(0) != os.getpid():
            self._await_the_end_of_the_command(generation)
        raise SystemExit(SUPERSEDED_EXIT_CODE)

    def _await_the_end_of_the_command(self, generation: int) -> None:
        """Waits for SIGTERM: a shell script that ignores exit codes would continue with its next line, so the launcher
        ends the whole command."""

        def leave(number: int, frame: object) -> None:
            raise SystemExit(SUPERSEDED_EXIT_CODE)

        signal.signal(signal.SIGTERM, leave)
        self._outbox.post("/v1/rendezvous/superseded", SupersededReport(generation=generation))
        threading.Event().wait(_COMMAND_ENDS.total_seconds())

    def _leave_completed_stage(self) -> SystemExit:
        """Returns the exception that ends this torchrun with success and without ranks: the job has finished this
        stage."""
        text = (
            f"perdure: torchrun {self._stage + 1} of this command has finished in this job: its ranks do not run again"
        )
        sys.stderr.write(f"{text}\n")
        self._outbox.flush(_LAST_REPORT)
        self._leave_stage()
        return SystemExit(0)

    def _leave_stage(self) -> None:
        """Records that this torchrun ends with 0: the command's next torchrun is the next stage."""
        self._state.write(RendezvousState(handler_pid=os.getpid(), generation=self._entered, stage=self._stage + 1))

    def _first_rank_steps(self) -> bool:
        return self._world is not None and steps(
            self._progress, self._world.base_rank, generation=self._world.generation
        )

    def _prepare_to_join(self) -> None:
        """Prepares ranks before the node joins an elastic job: other nodes may be training and stop when it joins.

        In a job that is not elastic they wait for this node anyway, and prepare their own ranks meanwhile.
        """
        if self._warm is not None and self._parameters.min_nodes < self._parameters.max_nodes:
            self._warm.wait_until_warm(PREPARATION)

    def _prepare(self, world: World) -> None:
        # In the exit barrier this process is about to end, and its successor will host the store; ranks that connected
        # to this one would lose it.
        if world.store_host and not self._finishing:
            self._open_store(world)

    def _open_store(self, world: World) -> RankExit | None:
        """Hosts the world's store if the world requires it of this node; returns the error if it cannot."""
        if not world.store_host:
            return None
        with self._storing:
            if world.generation in self._stores:
                return None
            try:
                listening = self._ports.take(world.store_port)
                self._stores[world.generation] = serve_store(self._ports.host, world.store_port, listening)
            except (OSError, RuntimeError, TypeError) as error:
                reason = f"the store of generation {world.generation} cannot listen on port {world.store_port}: {error}"
                logger.error("%s", reason)
                return RankExit(local_rank=0, global_rank=world.base_rank, error=reason, time=time.time())
        return None

    def _hello(self) -> HandlerHello:
        return HandlerHello(
            pid=os.getpid(),
            torch=str(torch.__version__),
            min_nodes=self._parameters.min_nodes,
            max_nodes=self._parameters.max_nodes,
            processes=self._processes,
            store_ports=tuple(self._ports.numbers),
        )

    def _report_ready(self, exits: Sequence[RankExit]) -> None:
        killed = self._memory.out_of_memory_kills > self._out_of_memory_kills
        self._outbox.post(
            _READY,
            ReadyReport(
                after_generation=self._entered,
                ranks=tuple(exits),
                store_ports=tuple(self._ports.numbers),
                processes=self._processes,
                out_of_memory=killed,
                memory_limit=self._memory.limit_bytes if killed else None,
                stage=self._stage,
            ),
            delivered=self._spool.clear if exits else None,
        )

    def _report_ready_again(self) -> None:
        """Reports again that this torchrun waits, to an agent that may have forgotten it. Failures are not repeated:
        the agent has to keep them."""
        if self._waiting_since == self._entered and not self._outbox.holds(_READY):
            self._report_ready(())

    def _with_reason(self, exits: Sequence[RankExit]) -> Sequence[RankExit]:
        """Returns an exit that explains a rendezvous without a newer world: ranks failed, even if torchrun does not log
        which."""
        if exits or self._world is None:
            return exits
        reason = "torchrun restarts its ranks, and its log does not say which of them failed"
        return [RankExit(local_rank=0, global_rank=self._world.base_rank, error=reason, time=time.time())]


def _take_place(run_directory: Path) -> int | None:
    """Returns a descriptor that is locked for as long as this torchrun runs; None if the disk has no locks.

    Two torchruns in one world would be two processes of each rank, and each would find the other's peers.

    Raises:
        UnmanagedTrainingError: if another torchrun holds the lock, and does not end soon.
    """
    deadline = time.monotonic() + _PREDECESSOR_ENDS.total_seconds()
    with contextlib.suppress(OSError):
        place = os.open(run_directory / layout.TORCHRUN_LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        while True:
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return place
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(_LOOK_AGAIN)
        stop(run_directory, Case.TORCHRUNS_AT_ONCE.value)
    return None


def _another_torchrun(known: RendezvousState, launch: int) -> str:
    """Returns why this torchrun must not take part: the previous one did not finish its ranks, and had another command
    line."""
    if known.launch in (0, launch):
        return ""
    return (
        "the torchrun before this one did not finish its ranks, and this one has another command line; "
        "the command is started again from its beginning"
    )
