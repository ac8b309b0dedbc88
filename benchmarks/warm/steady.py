"""What warm starts cost while nothing fails: the step time of a forked rank, and the memory of the interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from pydantic import BaseModel

from benchmarks.recovery.processes import QUIET_NETWORK, TrialFailed
from perdure_launcher.processes import begin_child
from perdure_launcher.warm.keeper import WarmKeeper, offer
from perdure_launcher.warm.names import PID
from perdure_launcher.warm.plan import Plan
from perdure_launcher.warm.starts import read_start

SCRIPT = Path(__file__).with_name("steps.py")
PLACE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "PERDURE_GENERATION": "1"}
RUN_SECONDS = 120


class StepTimes(BaseModel):
    """Medians of runs, in seconds, one for one in turn."""

    started: tuple[float, ...]
    forked: tuple[float, ...]
    interpreter_mb: float
    """Proportional set size of the warm interpreter before anything was forked: memory that is shared counts once."""

    @property
    def ratio(self) -> float:
        """Forked over started: the median of neighbouring runs' ratios, as the machine's mood changes over minutes."""
        return median(warm / cold for warm, cold in zip(self.forked, self.started, strict=True))


def measure_step_times(*, runs: int, steps: int) -> StepTimes:
    """Times the same steps in started and in forked processes, in turn.

    Raises:
        TrialFailed: if the runs that were to be forked were not.
    """
    arguments = ["-u", str(SCRIPT), str(steps)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
    environment = {**inherited, **QUIET_NETWORK, "PYTHONPATH": str(SCRIPT.parents[2])}
    with tempfile.TemporaryDirectory(prefix="pb-") as parent:
        folder = Path(parent) / "warm"
        offered: dict[str, str] = {}
        if reason := offer(folder, offered):
            raise TrialFailed(reason)
        keeper = WarmKeeper(folder=folder, python=sys.executable, plan=Plan.of_ranks(arguments, environment))
        try:
            keeper.ensure()
            _run([offered["PYTHON_EXEC"], *arguments], {**environment, **PLACE, **offered})
            memory = proportional_set_mb(int((folder / PID).read_text(encoding="utf-8")))
            started: list[float] = []
            forked: list[float] = []
            for _ in range(runs):
                started.append(_run([sys.executable, *arguments], {**environment, **PLACE}))
                forked.append(_run([offered["PYTHON_EXEC"], *arguments], {**environment, **PLACE, **offered}))
                start = read_start(folder, 0)
                if start is None or not start.warm:
                    raise TrialFailed(f"a run was not forked: {start.reason if start else 'nothing is known of it'}")
        finally:
            keeper.close()
    return StepTimes(started=tuple(started), forked=tuple(forked), interpreter_mb=memory)


def _run(command: list[str], environment: dict[str, str]) -> float:
    ended = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
        # As torchrun's ranks: a shell may have had us ignore signals in the background.
        preexec_fn=begin_child,
    )
    if ended.returncode != 0:
        raise TrialFailed(f"{' '.join(command)} ended with {ended.returncode}: {ended.stderr[-500:]}")
    return float(ended.stdout)


def proportional_set_mb(pid: int) -> float:
    """As the kernel counts it."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 / 1e6 if found else 0.0
