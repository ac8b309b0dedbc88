"""The lower bound for any supervisor that starts processes: the same ranks without one, from start to first step."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from .processes import TrialFailed, eventually, free_port, kill, start, tree
from .records import Scenario, SystemName, TrialRecord
from .steps import StepLog, find_world
from .trial import START_TIMEOUT

TRAIN = Path(__file__).with_name("train.py")


async def run_floor(scenario: Scenario, *, number: int, folder: Path, nodes: int = 2) -> TrialRecord:
    """Starts the number of ranks that the scenario ends with."""
    record = TrialRecord(system=SystemName.FLOOR, scenario=scenario, number=number, size=nodes, recovered=False)
    size = scenario.world_size_after(nodes)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    log = StepLog(folder)
    began = time.time()
    ranks = [
        await start(
            [sys.executable, "-u", TRAIN],
            env={**place, "RANK": str(rank), "LOCAL_RANK": "0", "BENCH_FOLDER": str(folder)},
            log=folder / f"rank-{rank}.log",
        )
        for rank in range(size)
    ]
    try:
        world = await eventually(
            lambda: find_world(log.refresh(), world_size=size, after=began),
            seconds=START_TIMEOUT,
            otherwise="bare processes did not step",
        )
        return record.model_copy(update={"recovered": True, "seconds": world.time - began})
    except TrialFailed as failed:
        return record.model_copy(update={"error": str(failed)})
    finally:
        kill(process for rank in ranks for process in tree(rank.pid))
        for rank in ranks:
            await rank.wait()
