"""Kills two ranks with a snapshot in memory, and measures what new ones need to restore."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.recovery.processes import free_port

KILLS = 3
NODES = 2


class Ranks:
    """Starts the two ranks, each with a memory folder of its own."""

    def __init__(self, folder: Path, memory: Path, gigabytes: float) -> None:
        self._options = [str(folder), "--gigabytes", str(gigabytes)]
        self._memory = memory
        self._saved = folder / "saved.pt"
        self._generation = 0

    def measure(self) -> dict[str, float]:
        """Returns the seconds of the slower rank after each kind of loss: medians."""
        times: dict[str, list[float]] = {"process": [], "node": [], "disk": [], "cached": []}
        for _ in range(KILLS):
            for node in range(NODES):
                shutil.rmtree(self._memory / f"node-{node}", ignore_errors=True)
            self._save_and_kill()
            times["process"].append(self._restore("memory"))
            # Another node takes the second one's place.
            shutil.rmtree(self._memory / "node-1")
            times["node"].append(self._restore("memory"))
            self._forget_file()
            times["disk"].append(self._restore("disk"))
            times["cached"].append(self._restore("disk"))
        return {name: statistics.median(values) for name, values in times.items()}

    def _save_and_kill(self) -> None:
        with self._started("save") as ranks:
            assert ranks[0].stdout is not None
            if not ranks[0].stdout.readline():
                raise RuntimeError("the ranks ended before they had saved; their errors are above")
            for rank in ranks:
                rank.kill()

    def _restore(self, way: str) -> float:
        with self._started(way) as ranks:
            output, _ = ranks[0].communicate(timeout=600)
        return float(json.loads(output)["value"])

    @contextmanager
    def _started(self, way: str) -> Generator[list[subprocess.Popen[str]]]:
        self._generation += 1
        port = str(free_port())
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.checkpoint.restore", *self._options, way],
                env=os.environ | self._environment(rank, port),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(NODES)
        ]
        try:
            yield ranks
        finally:
            for rank in ranks:
                if sys.exc_info()[0] is not None:
                    rank.kill()
                rank.wait()

    def _environment(self, rank: int, port: str) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(NODES),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            "PERDURE_MEMORY_DIR": str(self._memory / f"node-{rank}"),
            "PERDURE_RUN_ID": "bench",
            "PERDURE_GENERATION": str(self._generation),
        }

    def _forget_file(self) -> None:
        """Takes the file out of the page cache, as on a node that did not write it."""
        with self._saved.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
