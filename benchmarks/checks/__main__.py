"""Measures what checks cost: how much later a job makes its first step with `preflight`, and how much longer steps take
whose gradients are replayed. Both are paired: what is compared alternates, in one run on one machine.

python -m benchmarks.checks [--starts 8] [--minutes 1]
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.recovery.perdure_job import ControlPlane, control_plane
from perdure.contract import JobPhase

_KINDS = ("off", "quick", "full")
_SCRIPT = Path(__file__).with_name("first_step.py")
_REPLAYED = Path(__file__).with_name("replayed.py")
_START_SECONDS = 180.0
_LOOK_SECONDS = 0.05


def main(
    starts: Annotated[int, typer.Option(help="Starts of a job with each kind of preflight.")] = 8,
    minutes: Annotated[float, typer.Option(help="Minutes of steps, half of them with replays.")] = 1.0,
) -> None:
    """Measures what preflight and replays cost."""
    print(json.dumps(asyncio.run(_starts(starts)) | _replays(minutes)))


async def _starts(count: int) -> dict[str, Any]:
    """Starts jobs of two nodes, and times each of them up to its first step."""
    seconds: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    async with control_plane() as plane:
        await _start(plane, "warmup", "off")
        for number in range(count):
            # The first of three begins beside other files in memory than the last.
            for kind in (*_KINDS[number % 3 :], *_KINDS[: number % 3]):
                seconds[kind].append(await _start(plane, f"{kind}-{number}", kind))
                print(f"{kind}: {seconds[kind][-1]:.2f} s", file=sys.stderr)
    figures: dict[str, Any] = {f"{kind}_s": round(median(values), 2) for kind, values in seconds.items()}
    for kind in _KINDS[1:]:
        later = [one - off for one, off in zip(seconds[kind], seconds["off"], strict=True)]
        figures[f"{kind}_later_s"] = round(median(later), 2)
        figures[f"{kind}_later_range_s"] = [round(min(later), 2), round(max(later), 2)]
    return figures


async def _start(plane: ControlPlane, name: str, preflight: str) -> float:
    out = plane.state / "out" / name
    out.mkdir(parents=True)
    begun = time.time()
    await plane.client.submit(
        {
            "name": name,
            "env": {"OMP_NUM_THREADS": "1"},
            "preflight": preflight,
            "recovery": {"warm_starts": False},
            "roles": {"worker": {"nodes": 2, "command": ["torchrun", str(_SCRIPT), str(out)]}},
        }
    )
    files = [out / f"rank-{rank}" for rank in range(2)]
    deadline = time.monotonic() + _START_SECONDS
    while not all(file.exists() and file.stat().st_size for file in files):
        if time.monotonic() > deadline:
            raise SystemExit(f"{name}: no step within {_START_SECONDS:g} s: {(await plane.client.status(name)).reason}")
        await asyncio.sleep(_LOOK_SECONDS)
    took = max(float(file.read_text()) for file in files) - begun
    result = await plane.client.wait(name)
    if result.phase is not JobPhase.SUCCEEDED:
        raise SystemExit(f"{name}: {result.reason}")
    return took


def _replays(minutes: float) -> dict[str, Any]:
    """Trains with two ranks over gloo, without a job, and times blocks of steps with replays and without."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PERDURE_RUN_ID": "bench",
            "PERDURE_GENERATION": "1",
            "PERDURE_PROGRESS_DIR": str(Path(folder) / "progress"),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        ran = subprocess.run(
            [*command, "--rdzv-id", "bench", str(_REPLAYED), str(minutes * 60)],
            env=environment,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    return json.loads(ran.stdout.splitlines()[-1])


if __name__ == "__main__":
    typer.run(main)
