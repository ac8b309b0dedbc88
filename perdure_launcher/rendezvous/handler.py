"""torchrun's rendezvous, held by the job: worlds come from the agent, and no node waits on another one.

torchrun asks `num_nodes_waiting()` ten times a second, and restarts its ranks when it says 1; `next_rendezvous()` then
returns the world that is already there. While the agent is away ranks train on, and what waits goes on waiting.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from ..cgroups import MemoryController
from ..client import AgentSession, Outbox
from ..environment import STORE_VARIABLE, TorchrunSettings, generation_environment
from ..facts import SUPERSEDED_EXIT_CODE, ExitSpool, RankExit
from ..ports import PortPool
from ..state import RendezvousState, StateFile
from ..warm.keeper import PREPARATION, WarmKeeper
from ..worlds import World
from .exits import ExitWatch
from .feed import WorldFeed
from .store import WorldStore
from .torchrun import let_the_job_decide

logger = logging.getLogger(__name__)

_READY = "/v1/rendezvous/ready"


class PerdureRendezvous(RendezvousHandler):
    """One torchrun's place in the job."""

    def __init__(
        self, parameters: RendezvousParameters, settings: TorchrunSettings, *, processes: int, warm: WarmKeeper | None
    ) -> None:
        """Creates the handler; nothing is said to the agent before the first rendezvous.

        Args:
            parameters: As torchrun has them from its flags and its environment.
            settings: As the launcher has them from the job.
            processes: Ranks that this torchrun starts.
            warm: Keeps the interpreter that ranks are forked from; None where they start cold.
        """
        run_directory = Path(settings.run_directory)
        self._parameters = parameters
        self._settings = settings
        self._processes = processes
        self._warm = warm
        self._state = StateFile(run_directory)
        self._entered = self._state.read().generation
        self._world: World | None = None
        self._waiting_since: int | None = None
        self._progress = run_directory / "progress"
        self._spool = ExitSpool(run_directory / "errors" / "rank-exits.json")
        self._memory = MemoryController()
        self._out_of_memory_kills = self._memory.out_of_memory_kills
        self._ports = PortPool(settings.address, listening=True, allowed=settings.allowed_ports, start=self._entered)
        self._stores: dict[int, TCPStore] = {}
        self._storing = threading.Lock()
        self._finishing = False
        self._session = AgentSession(
            socket_path=run_directory / "agent.sock",
            hello_path="/v1/rendezvous/hello",
            hello=self._hello,
            on_return=self._say_ready_again,
        )
        self._outbox = Outbox(self._session)
        self._feed = WorldFeed(self._session, after=self._entered, prepare=self._prepare)
        self._exits = ExitWatch(
            stop_grace=timedelta(seconds=settings.stop_grace_s),
            warm_folder=settings.warm_folder,
            on_exits=lambda exits: self._spool.write(owner=os.getpid(), exits=exits),
        )
        self._state.write(RendezvousState(handler_pid=os.getpid(), generation=self._entered))
        self._exits.install()
        if warm is not None:
            warm.ensure()
        self._feed.start()
        self._outbox.start()

    def get_backend(self) -> str:
        """The name that torchrun asked for: it checks that it got what it wanted."""
        return self._parameters.backend

    def get_run_id(self) -> str:
        """Names torchrun's log folder, so it is free of slashes."""
        return self._settings.run_id

    @property
    def use_agent_store(self) -> bool:
        """Ranks connect to the generation's store, and none of them opens one."""
        return True

    def is_closed(self) -> bool:
        """Never: whether the job goes on is not for one node to say."""
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        """1 where a newer world is there: torchrun then restarts its ranks. Asked ten times a second."""
        return 1 if self._feed.newer_than(self._entered) else 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns the newest world, and waits for it if need be.

        Raises:
            RendezvousError: if this node has no port to offer for the world's store.
        """
        let_the_job_decide(self)
        exits = self._exits.take()
        while True:
            world = self._feed.newer_than(self._entered)
            if world is None or exits:
                self._ports.replenish()
                if world is None and (problem := self._ports.problem):
                    raise RendezvousError(problem)
                if world is None and self._world is None:
                    self._prepare_to_join()
                self._say_ready(self._explained(exits) if world is None else exits)
                exits = []
            if world is None:
                self._waiting_since = self._entered
                world = self._feed.wait_newer(self._entered)
                self._waiting_since = None
            if failure := self._open_store(world):
                self._entered = world.generation
                exits = [failure]
                continue
            return self._enter(world)

    def shutdown(self) -> bool:
        """torchrun leaves, with success or not; the job goes on without it."""
        self._session.close()
        self._ports.close()
        if self._warm is not None:
            self._warm.close()
        return True

    def _enter(self, world: World) -> RendezvousInfo:
        with self._storing:
            for generation in [old for old in self._stores if old < world.generation]:
                # The store's threads and its port end with the last reference.
                del self._stores[generation]
        self._world = world
        self._entered = world.generation
        if self._warm is not None:
            self._warm.ensure()
        self._exits.base_rank = world.base_rank
        self._out_of_memory_kills = self._memory.out_of_memory_kills
        self._state.write(RendezvousState(handler_pid=os.getpid(), generation=world.generation))
        # Ranks inherit this process's environment.
        os.environ.update(
            generation_environment(
                generation=world.generation, progress=self._progress, run_id=self._settings.run_id, parent=os.getpid()
            )
        )
        os.environ[STORE_VARIABLE] = f"{world.store_address}:{world.store_port}"
        self._ports.replenish()
        self._outbox.post(
            "/v1/rendezvous/entered",
            {"generation": world.generation, "time": time.time(), "store_ports": self._ports.numbers},
        )
        store = WorldStore(world, exit_barrier=lambda: self._exit_barrier(world.generation))
        return RendezvousInfo(
            cast(Any, store),
            world.group_rank,
            world.nodes,
            RendezvousStoreInfo(world.store_address, world.store_port),
        )

    def _exit_barrier(self, generation: int) -> None:
        """All local ranks ended well; waits for the other nodes' ranks.

        Raises:
            SystemExit: if the generation is over before all have finished: torchrun cannot start ranks again from
                here, but the launcher can start torchrun again.
        """
        self._finishing = True
        self._outbox.post("/v1/rendezvous/finished", {"generation": generation, "time": time.time()})
        if not self._feed.wait_complete(generation):
            logger.warning("generation %s is over before all its ranks have finished; starting again", generation)
            raise SystemExit(SUPERSEDED_EXIT_CODE)

    def _prepare_to_join(self) -> None:
        """Where the job is elastic the others may be training, and stop for us: by then our ranks start at once.

        Where it is not they stand still until we are there, and prepare their own ranks while we prepare ours.
        """
        if self._warm is not None and self._parameters.min_nodes < self._parameters.max_nodes:
            self._warm.wait_until_warm(PREPARATION)

    def _prepare(self, world: World) -> None:
        # In the exit barrier this process is about to end, and its successor will host the store: ranks that connect
        # to this one would lose it.
        if world.store_host and not self._finishing:
            self._open_store(world)

    def _open_store(self, world: World) -> RankExit | None:
        """Hosts the world's store where that is this node's part; says why if it cannot."""
        if not world.store_host:
            return None
        with self._storing:
            if world.generation in self._stores:
                return None
            try:
                listening = self._ports.take(world.store_port)
                self._stores[world.generation] = TCPStore(
                    self._ports.host,
                    world.store_port,
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=listening.detach(),
                )
            except (OSError, RuntimeError) as error:
                reason = f"the store of generation {world.generation} cannot listen on port {world.store_port}: {error}"
                logger.error("%s", reason)
                return RankExit(local_rank=0, global_rank=world.base_rank, error=reason, time=time.time())
        return None

    def _hello(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "torch": str(torch.__version__),
            "min_nodes": self._parameters.min_nodes,
            "max_nodes": self._parameters.max_nodes,
            "processes": self._processes,
            "run_id": self._settings.run_id,
            "store_ports": self._ports.numbers,
        }

    def _say_ready(self, exits: Sequence[RankExit]) -> None:
        killed = self._memory.out_of_memory_kills > self._out_of_memory_kills
        self._outbox.post(
            _READY,
            {
                "after_generation": self._entered,
                "ranks": [item.as_json() for item in exits],
                "store_ports": self._ports.numbers,
                "processes": self._processes,
                "out_of_memory": killed,
            },
            delivered=self._spool.clear if exits else None,
        )

    def _say_ready_again(self) -> None:
        """An agent that was away may have forgotten that somebody waits; never what failed, which it had to keep."""
        if self._waiting_since == self._entered and not self._outbox.holds(_READY):
            self._say_ready(())

    def _explained(self, exits: Sequence[RankExit]) -> Sequence[RankExit]:
        """A rendezvous without a newer world means that ranks failed, even where torchrun did not say which."""
        if exits or self._world is None:
            return exits
        reason = "torchrun restarts its ranks, and its log does not say which of them failed"
        return [RankExit(local_rank=0, global_rank=self._world.base_rank, error=reason, time=time.time())]
