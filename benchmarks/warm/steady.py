"""Measures the cost of warm starts while nothing fails: the step time of a forked rank, and the interpreter's memory.

A difference of half a percent is smaller than the load changes of a shared machine. So a forked and a started rank run
at the same time and step alternately, a few dozen milliseconds each, and each block is compared only with its neighbor.
The placement of a process's memory matters as well, so there are many such pairs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from pydantic import BaseModel

from benchmarks.recovery.processes import QUIET_NETWORK, TrialFailed
from perdure_launcher.system.processes import begin_child
from perdure_launcher.warm_start.names import PID
from perdure_launcher.warm_start.plan import Plan
from perdure_launcher.warm_start.starts import read_start
from perdure_launcher.warm_start.supervisor import InterpreterSupervisor, offer

SCRIPT = Path(__file__).with_name("steps.py")
PLACE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "PERDURE_GENERATION": "1"}
STEPS = 25
"""The number of steps in a block."""
LEAVE_SECONDS = 60


class Pair(BaseModel):
    """A started and a forked rank that stepped alternately: the seconds of each one's blocks, in order."""

    started: tuple[float, ...]
    forked: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The forked rank's time divided by the started one's: the median over neighboring blocks."""
        return median(forked / started for forked, started in zip(self.forked, self.started, strict=True))


class StepTimes(BaseModel):
    """The measurements of all pairs."""

    pairs: tuple[Pair, ...]
    interpreter_mb: float
    """Proportional set size of the warm interpreter before anything was forked: memory that is shared counts once."""

    @property
    def ratio(self) -> float:
        """The forked ranks' time divided by the started ones': the median of the pairs' ratios."""
        return median(pair.ratio for pair in self.pairs)

    @property
    def started_seconds(self) -> float:
        """The median step time of started ranks."""
        return median(seconds for pair in self.pairs for seconds in pair.started) / STEPS

    @property
    def forked_seconds(self) -> float:
        """The median step time of forked ranks."""
        return median(seconds for pair in self.pairs for seconds in pair.forked) / STEPS


def measure_step_times(*, pairs: int, blocks: int) -> StepTimes:
    """Measures the same steps in started and in forked processes.

    Args:
        pairs: the number of pairs, which run one after the other.
        blocks: the number of blocks of each process.

    Raises:
        TrialFailed: if a process was not forked although it should have been, or if one ended early.
    """
    arguments = ["-u", str(SCRIPT), str(STEPS)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
    environment = {**inherited, **QUIET_NETWORK, "PYTHONPATH": str(SCRIPT.parents[2])}
    with tempfile.TemporaryDirectory(prefix="pb-") as parent:
        folder = Path(parent) / "warm"
        offered: dict[str, str] = {}
        if reason := offer(folder, offered):
            raise TrialFailed(reason)
        started = _Kind([sys.executable, *arguments], {**environment, **PLACE})
        forked = _Kind([offered["PYTHON_EXEC"], *arguments], {**environment, **PLACE, **offered})
        supervisor = InterpreterSupervisor(
            folder=folder, python=sys.executable, plan=Plan.of_ranks(arguments, environment)
        )
        try:
            supervisor.ensure()
            with forked.rank():  # Once it steps, the interpreter is complete.
                memory = proportional_set_mb(int((folder / PID).read_text(encoding="utf-8")))
            found: list[Pair] = []
            for _ in range(pairs):
                found.append(_step_in_turn(started, forked, blocks))
                start = read_start(folder, 0)
                if start is None or not start.warm:
                    raise TrialFailed(f"a run was not forked: {start.reason if start else 'its start is unknown'}")
        finally:
            supervisor.close()
    return StepTimes(pairs=tuple(found), interpreter_mb=memory)


class _Rank:
    """A rank that runs a block of steps on request."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._ask, self._answer = process.stdin, process.stdout

    def block(self) -> float:
        """Runs a block of steps; returns the seconds."""
        print(file=self._ask, flush=True)
        return float(self.line())

    def line(self) -> str:
        """Reads the rank's next line.

        Raises:
            TrialFailed: if the rank ends instead.
        """
        line = self._answer.readline()
        if not line:
            raise TrialFailed("a rank ended early")
        return line


class _Kind:
    """A kind of rank: how it is started."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._command = command
        self._environment = environment

    @contextmanager
    def rank(self) -> Iterator[_Rank]:
        """Provides a rank that is ready to step; ends it with the context."""
        with subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Like torchrun's ranks: in the background a shell may have made this process ignore signals.
            preexec_fn=begin_child,  # noqa: PLW1509 - system calls only
        ) as process:
            try:
                rank = _Rank(process)
                rank.line()
                yield rank
                process.communicate(timeout=LEAVE_SECONDS)
            finally:
                process.kill()


def _step_in_turn(started: _Kind, forked: _Kind, blocks: int) -> Pair:
    times: tuple[list[float], list[float]] = ([], [])
    with ExitStack() as stack:
        ranks = [stack.enter_context(kind.rank()) for kind in (started, forked)]
        for number in range(blocks):
            # The order alternates, so that neither kind gains an advantage.
            for which in (0, 1) if number % 2 else (1, 0):
                times[which].append(ranks[which].block())
    return Pair(started=tuple(times[0]), forked=tuple(times[1]))


def proportional_set_mb(pid: int) -> float:
    """Returns the proportional set size of a process, as counted by the kernel."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 / 1e6 if found else 0.0
