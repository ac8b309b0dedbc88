"""Mode for commands without torchrun: the launcher starts one copy per rank, with its rank variables.

It does what torchrun and its handler do in the other mode: waits for a world, starts ranks, and ends all if one fails.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from perdure_training.node_api.addresses import host_and_port
from perdure_training.node_api.bodies import (
    CommandExit,
    Desired,
    EnteredReport,
    FinishedReport,
    RankExit,
    ReadyReport,
    World,
)
from perdure_training.node_api.progress_file import steps
from perdure_training.node_api.rank_environment import SOLE_VARIABLE
from perdure_training.node_api.text import well_formed

from ..environment import STORE_VARIABLE, generation_environment, read_roles
from ..rank_exits import after_others, describe_status, rank_exit, split_status, with_error
from ..system import processes
from ..system.cleaners import without_cleaners
from ..system.ports import PortPool
from ..tensorflow import tensorflow_environment
from ..warm_start.names import EXECUTABLE_VARIABLE
from ..warm_start.plan import Plan
from ..warm_start.starts import read_start, record_all_cold
from ..warm_start.supervisor import PREPARATION, SETTLING, InterpreterSupervisor, offer
from .capture import Output
from .node import NodeResources
from .process_tree import CommandFailed, Exit, explain_leftovers
from .python_commands import python_command
from .torchrun_mode import not_started

logger = logging.getLogger(__name__)

_DRAIN = timedelta(seconds=1)
_JUST_BEFORE = 60.0
"""Seconds before the end of a rank in which an error may be why it ended."""
_PIPE = "where a pipe hides the exit code, as of `python train.py | tee log`, begin the script with `set -o pipefail`"
_LOOK = 0.5
"""Seconds between two checks for the first step of ranks, for which there is no event."""


@dataclass(kw_only=True)
class _Ranks:
    """The ranks of one generation."""

    world: World
    output: Output
    out_of_memory_kills: int
    local_ranks: dict[int, int] = field(default_factory=dict[int, int])
    """Local ranks by PID."""
    codes: dict[int, int] = field(default_factory=dict[int, int])
    """Return codes by local rank."""
    failures: list[RankExit] = field(default_factory=list[RankExit])
    superseded: bool = False
    """Whether the launcher ended the ranks for another generation."""


class EnvMode:
    """Runs the command `processes` times per world."""

    name = "env"

    def __init__(self, node: NodeResources) -> None:
        self._node = node
        self._ports = PortPool(node.config.address, listening=False, allowed=node.config.store_ports)
        self._command: Sequence[str] = node.config.command
        self._environment = dict(node.environment)
        if node.config.max_nodes == node.processes == 1:
            self._environment[SOLE_VARIABLE] = "1"
        self._warm = self._prepare_warm_starts()
        self._current: _Ranks | None = None
        self._entered = 0
        self._ready_after: int | None = None
        self._over = False
        """The attempt has ended; nothing is started until the agent requests it."""
        self._prepared = threading.Event()
        self.attempt = 0

    def begin(self) -> None:
        """Starts no rank before there is a world, but imports the ranks' modules in advance."""
        if self._warm is not None:
            self._warm.ensure()
        if self._warm is not None and self._node.config.min_nodes < self._node.config.max_nodes:
            # As with torchrun: other nodes may be training, and stop when this one joins.
            threading.Thread(target=self._prepare, args=(self._warm,), name="preparation", daemon=True).start()
        else:
            self._prepared.set()

    def follow(self, desired: Desired) -> None:
        node = self._node
        if self._warm is not None:
            self._warm.follow_ranks(self._first_rank_steps)
        if (current := self._current) is not None:
            self._keep_in_newer(current, desired)
            self._end_if_not_desired(current, desired)
        elif node.tree.vacant and desired.run:
            if desired.attempt > self.attempt:
                self.attempt, self._over, self._ready_after = desired.attempt, False, None
            if desired.world is not None and desired.world.generation > self._entered:
                self._start(desired.world)
            elif not self._over and self._ready_after != self._entered and (self._entered or self._prepared.is_set()):
                self._report_ready(())

    def observe(self, exits: list[Exit]) -> None:
        current, tree = self._current, self._node.tree
        if current is None:
            return
        for ended in exits:
            local_rank = current.local_ranks.get(ended.pid)
            if local_rank is None:
                continue
            current.codes[local_rank] = ended.code
            ended_by_us = tree.ending and ended.code in (-signal.SIGTERM, -signal.SIGKILL)
            if ended.code != 0 and not ended_by_us and not current.superseded:
                failure = self._failure(current, ended, local_rank)
                current.failures.append(failure)
                if failure.signal == signal.SIGKILL:
                    # What a killed rank has left has nobody to work for, and may hold its ports.
                    groups = (ended.pid, failure.pid)
                    left = [process.pid for process in processes.descendants() if process.group in groups]
                    processes.send(without_cleaners(left), signal.SIGKILL)
        if tree.empty or tree.ending:
            return
        if current.failures:
            grace = self._node.config.stop_grace
            tree.terminate(grace, leftover_grace=grace)
        elif len(current.codes) == len(current.local_ranks):
            if left := tree.leftovers():
                self.explain(explain_leftovers(left))
            tree.terminate_leftovers(self._node.config.stop_grace)

    def settle(self) -> None:
        current = self._current
        if current is None:
            return
        self._current = None
        current.output.drain(_DRAIN)
        self._ports.replenish()
        if current.superseded:
            return
        if current.failures:
            killed = self._node.memory.out_of_memory_kills > current.out_of_memory_kills
            self._report_ready(current.failures, out_of_memory=killed)
            return
        self._over = True
        codes = [current.codes.get(local_rank, -signal.SIGKILL) for local_rank in current.local_ranks.values()]
        if not any(codes):
            self._tell_hidden_error(current)
            self._node.outbox.post(
                "/v1/rendezvous/finished", FinishedReport(generation=current.world.generation, time=time.time())
            )
        self._report_exit(current, next((code for code in codes if code), 0))

    def report_ready_again(self) -> None:
        """Reports again that this node waits, to an agent that may have forgotten it. Called by any thread."""
        if self._current is None and self._ready_after is not None and not self._over:
            self._post_ready(())

    def explain(self, text: str) -> None:
        if self._current is not None:
            self._current.output.note(f"perdure: {well_formed(text)}\n".encode())

    def _first_rank_steps(self) -> bool:
        current = self._current
        return current is not None and steps(
            self._node.config.progress, current.world.base_rank, generation=current.world.generation
        )

    def _await_steps(self, ranks: _Ranks) -> None:
        """Wakes the launcher's main thread when the warm interpreter can be restarted, which only that thread may
        do."""
        until = time.monotonic() + SETTLING.total_seconds()
        while self._current is ranks and time.monotonic() < until and not self._first_rank_steps():
            time.sleep(_LOOK)
        self._node.wake()

    def _prepare(self, warm: InterpreterSupervisor) -> None:
        warm.wait_until_warm(PREPARATION)
        self._prepared.set()
        self._node.wake()

    def _keep_in_newer(self, current: _Ranks, desired: Desired) -> None:
        """Has processes that run, and depend on no other, continue in a newer world."""
        world = desired.world
        if world is None or not world.keeps_processes or world.generation <= current.world.generation:
            return
        if not self._node.tree.ending and not current.codes:
            current.world, self._entered = world, world.generation
            self._report_entered(world)

    def _end_if_not_desired(self, current: _Ranks, desired: Desired) -> None:
        config, tree = self._node.config, self._node.tree
        if tree.ending:
            return
        generation = current.world.generation
        newer = desired.world is not None and desired.world.generation > generation
        if not desired.run and desired.attempt >= self.attempt:
            tree.terminate(config.termination_grace, leftover_grace=config.stop_grace)
        elif newer or desired.stop_generation >= generation or desired.attempt > self.attempt:
            current.superseded = True
            tree.terminate(config.stop_grace, leftover_grace=config.stop_grace)

    def _start(self, world: World) -> None:
        node = self._node
        self._entered, self._over, self._ready_after = world.generation, False, None
        output = node.capture.open()
        current = _Ranks(world=world, output=output, out_of_memory_kills=node.memory.out_of_memory_kills)
        if world.store_host:
            with contextlib.suppress(OSError):
                self._ports.take(world.store_port).close()
        restarted = self._warm is not None and self._warm.start_ranks()
        try:
            for local_rank in range(node.processes):
                pid = node.tree.spawn(
                    self._command,
                    env=self._rank_environment(world, local_rank),
                    workdir=node.workdir,
                    output=output.write_end,
                )
                current.local_ranks[pid] = local_rank
        except CommandFailed as failed:
            node.tree.kill()
            self._report_not_started(failed, output)
            return
        finally:
            output.close_write_end()
        self._current = current
        if restarted:
            threading.Thread(target=self._await_steps, args=(current,), name="first steps", daemon=True).start()
        logger.info("generation %s started as processes %s", world.generation, sorted(current.local_ranks))
        self._ports.keep_clear_of(world.store_port)
        self._ports.replenish()
        self._report_entered(world)

    def _report_entered(self, world: World) -> None:
        self._node.outbox.post(
            "/v1/rendezvous/entered",
            EnteredReport(generation=world.generation, time=time.time(), store_ports=tuple(self._ports.numbers)),
        )

    def _rank_environment(self, world: World, local_rank: int) -> dict[str, str]:
        config, processes = self._node.config, self._node.processes
        rank = world.base_rank + local_rank
        error_file = config.errors / f"rank-{rank}.json"
        with contextlib.suppress(OSError):
            error_file.unlink(missing_ok=True)
        generation = generation_environment(world, progress=config.progress, run_id=config.run_id, parent=os.getpid())
        return {
            **self._environment,
            **generation,
            **tensorflow_environment(config, json.loads(read_roles(config.progress) or "{}")),
            "MASTER_ADDR": world.store_address,
            "MASTER_PORT": str(world.store_port),
            "RANK": str(rank),
            "WORLD_SIZE": str(world.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(processes),
            "GROUP_RANK": str(world.group_rank),
            "NODE_RANK": str(world.group_rank),
            STORE_VARIABLE: host_and_port(world.store_address, world.store_port),
            # Shows frameworks that ranks and world size are set externally, so that they start no processes themselves.
            "TORCHELASTIC_RUN_ID": config.run_id,
            "TORCHELASTIC_ERROR_FILE": str(error_file),
        }

    def _prepare_warm_starts(self) -> InterpreterSupervisor | None:
        """Makes ranks start through the shim if the command is a Python program and the job allows it."""
        node, environment = self._node, self._environment
        found = python_command(
            self._command, path=environment.get("PATH", os.defpath), workdir=node.workdir or Path.cwd()
        )
        if not node.config.warm_starts:
            return None
        if found is None:
            record_all_cold(
                node.warm_folder, f"{self._command[0]} is not a Python program that can be started in advance"
            )
            return None
        plan = Plan.of_ranks(found.arguments, environment)
        if reason := offer(node.warm_folder, environment, python=found.python):
            logger.info("ranks start cold: %s", reason)
            record_all_cold(node.warm_folder, reason)
            return None
        self._command = (environment[EXECUTABLE_VARIABLE], *found.arguments)
        return node.interpreter_supervisor(found.python, plan)

    def _failure(self, current: _Ranks, ended: Exit, local_rank: int) -> RankExit:
        rank = current.world.base_rank + local_rank
        logger.info("rank %s ended with %s", rank, describe_status(*split_status(ended.code)))
        start = read_start(self._node.warm_folder, local_rank)
        if start is not None and start.generation != current.world.generation:
            # The rank ended before it could record its start.
            start = None
        failed = rank_exit(
            local_rank=local_rank,
            global_rank=rank,
            pid=start.pid if start else ended.pid,
            code=ended.code,
            error_file=self._node.config.errors / f"rank-{rank}.json",
        )
        base_rank = current.world.base_rank
        return after_others(failed, [base_rank + other for other, code in current.codes.items() if code == 0])

    def _tell_hidden_error(self, current: _Ranks) -> None:
        """Says in the log which error a shell has hidden, as that of a program whose output goes through `tee`: the
        exit code of a pipe is that of its last program."""
        for local_rank in current.local_ranks.values():
            rank = current.world.base_rank + local_rank
            ended = RankExit(local_rank=local_rank, global_rank=rank, exit_code=1)
            failed = with_error(ended, self._node.config.errors / f"rank-{rank}.json")
            if failed.error and failed.time is not None and time.time() - failed.time < _JUST_BEFORE:
                text = (
                    f"rank {rank} has ended with 0, just after a program of it had failed with {failed.error}: {_PIPE}"
                )
                current.output.note(f"perdure: {well_formed(text)}\n".encode())
                return

    def _report_ready(self, failures: Sequence[RankExit], *, out_of_memory: bool = False) -> None:
        self._ready_after = self._entered
        self._ports.replenish()
        problem = self._ports.problem
        if failures or not problem:
            self._post_ready(failures, out_of_memory=out_of_memory)
        if problem:
            output = self._node.capture.open()
            output.close_write_end()
            self._report_not_started(CommandFailed(os.EX_TEMPFAIL, problem), output)

    def _report_not_started(self, failed: CommandFailed, output: Output) -> None:
        logger.error("%s", failed)
        output.note(f"perdure: {well_formed(str(failed))}\n".encode())
        self._over = True
        self._node.outbox.post("/v1/launcher/exited", not_started(self.attempt, failed, output))

    def _post_ready(self, failures: Sequence[RankExit], *, out_of_memory: bool = False) -> None:
        self._node.outbox.post(
            "/v1/launcher/ready",
            ReadyReport(
                after_generation=self._entered,
                ranks=tuple(failures),
                store_ports=tuple(self._ports.numbers),
                processes=self._node.processes,
                out_of_memory=out_of_memory,
                memory_limit=self._node.memory.limit_bytes if out_of_memory else None,
            ),
        )

    def _report_exit(self, current: _Ranks, code: int) -> None:
        exit_code, signal_number = split_status(code)
        self._node.outbox.post(
            "/v1/launcher/exited",
            CommandExit(
                attempt=self.attempt,
                generation=current.world.generation,
                exit_code=exit_code,
                signal=signal_number,
                log_tail=current.output.tail,
                time=time.time(),
            ),
        )
