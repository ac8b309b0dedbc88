"""`make bench-checkpoint`: how long a save stops the training, and a restore takes, beside PyTorch's own ways and
DLRover's flash checkpoint.

Two ranks over gloo have the same state, as with DistributedDataParallel. Every way saves it several times in one run;
the medians of rank 0 count. Snapshots are in memory (/dev/shm), the others' files on the disk of the temporary folder.
Durable checkpoints are copied there by an agent, which syncs them; DLRover's agent does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoint import flash
from benchmarks.checkpoint.against import compare
from benchmarks.checkpoint.kills import Ranks
from benchmarks.recovery.dlrover_environment import NotAvailable
from tests.training.checkpoint_agent import NODE, checkpoint_agent

RANK = Path(__file__).with_name("rank.py")
MEMORY = Path("/dev/shm")


def main(
    gigabytes: Annotated[float, typer.Option(help="Size of a rank's parameters and optimizer state.")] = 1.0,
    saves: Annotated[
        int, typer.Option(help="Saves in each way that count; one more comes before, or as many as allocate memory.")
    ] = 5,
    steps: Annotated[int, typer.Option(help="Steps with snapshots, and as many without, three times in turn.")] = 30,
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the size.")] = False,
    against: Annotated[
        str | None, typer.Option(help="Only compares saves in memory with those of this former commit, in turn.")
    ] = None,
) -> None:
    """Saves the same state in several ways, and prints the stall of each."""
    console = Console(highlight=False)
    found: dict[str, Any] = {}
    size = gigabytes / 10 if quick else gigabytes
    if against is not None:
        figures = compare(against, gigabytes=size, saves=4 * saves, console=console)
        print(json.dumps(figures, separators=(",", ":")))
        return

    def take(lines: Iterable[str]) -> None:
        for what, value in values(lines):
            found[what] = value
            console.print(f"bench: {what}: {value}", soft_wrap=True)

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=MEMORY) as memory:
        arguments = [folder, "--gigabytes", str(size), "--saves", str(saves), "--steps", str(steps)]
        take(save(arguments, memory=memory))
        try:
            take(flash.save(arguments))
        except NotAvailable as reason:
            console.print(f"bench: DLRover was not measured: {reason}", markup=False)
        found["restore"] = Ranks(Path(folder), Path(memory), size).measure()
        console.print(f"bench: restore: {found['restore']}")
    report(found, console)


def save(arguments: list[str], *, memory: str) -> Iterator[str]:
    """Has two ranks save in every way but DLRover's; yields the lines of their output."""
    # The agent stores checkpoints of its own run only.
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", f"--rdzv-id={NODE.uid}"]
    launch = ["-m", "torch.distributed.run", *rendezvous, "--nproc-per-node=2"]
    with checkpoint_agent(Path(arguments[0]) / "storage", ranks=2, keep_last=1) as agent:
        environment = os.environ | {
            "PERDURE_MEMORY_DIR": memory,
            "BENCH_AGENT": agent.environment["PERDURE_PROGRESS_DIR"],
            "OMP_NUM_THREADS": "1",
        }
        with subprocess.Popen(
            [sys.executable, *launch, str(RANK), *arguments], env=environment, stdout=subprocess.PIPE, text=True
        ) as ranks:
            assert ranks.stdout is not None
            yield from ranks.stdout
    if ranks.returncode:
        sys.exit(f"bench: the ranks ended with {ranks.returncode}; their errors are above")


def values(lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yields what the ranks measured, by name."""
    for line in lines:
        if line.startswith('{"what"'):
            one = json.loads(line)
            yield one["what"], one["value"]


def report(found: dict[str, Any], console: Console) -> None:
    """Prints the table, and the result as the last line."""
    table = Table(title=f"Saving {found['size'] / 1e9:.2f} GB", title_justify="left")
    for column in ("", "training stops", "times a memcpy", "finished after"):
        table.add_column(column, justify="left" if not column else "right")
    copy = found["memcpy"]["stall"]
    ways = {name: value for name, value in found.items() if isinstance(value, dict) and "stall" in value}
    for name, way in ways.items():
        ratio = f"{way['stall'] / copy:.2f}"
        table.add_row(name, f"{way['stall'] * 1000:.0f} ms", ratio, f"{way['finished'] * 1000:.0f} ms")
    console.print(table)
    restore = found["restore"]
    console.print(
        f"restore by new processes: {restore['process']:.2f} s from memory after a kill of the ranks, "
        f"{restore['node']:.2f} s with a new node, from the other's memory; "
        f"by torch.load {restore['disk']:.2f} s from disk, {restore['cached']:.2f} s from the page cache"
    )
    for every in ("1", "auto"):
        console.print(f"steps with snapshots, every={every}: {found[f'overhead {every}']:+.1f} %")
    result = {
        "stall_vs_memcpy": round(ways["perdure"]["stall"] / copy, 3),
        "stall_vs_torch_save": round(ways["perdure"]["stall"] / ways["torch.save"]["stall"], 3),
        "durable_s": round(ways["perdure, durable"]["finished"], 2),
        "memory_restore_vs_disk": round(restore["process"] / restore["disk"], 3),
        "overhead_auto_pct": round(found["overhead auto"], 2),
    }
    print(json.dumps(result, separators=(",", ":")))


if __name__ == "__main__":
    typer.run(main)
