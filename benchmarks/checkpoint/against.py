"""Compares the cost of a save between the libraries of this tree and of a former commit, which take turns."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from rich.console import Console
from rich.table import Table

from benchmarks.recovery.processes import QUIET_NETWORK, free_port

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("save_cost.py")
MEMORY = Path("/dev/shm")
RANKS = 2
ALLOCATING = 4
"""Saves that take memory for the first time, and do not count."""
Figures = dict[str, float]


@dataclass(frozen=True)
class Case:
    """A state that is saved."""

    name: str
    key: str
    """In the last line."""
    megabytes: float
    split: bool
    """Each rank's state is its own, so that another node gets a copy of it."""


def cases(gigabytes: float) -> list[Case]:
    """The states: one whose bytes are the cost, and two whose bytes cost next to nothing."""
    return [
        # Two trees are in memory at once, each with two ranks and their snapshots.
        Case("large", "large", gigabytes * 250, split=False),
        Case("small", "small", 1.0, split=False),
        Case("small, with copies", "copied", 1.0, split=True),
    ]


class Saves(Protocol):
    """Ranks that save on request."""

    def save(self) -> Figures:
        """Has them save once; returns the figures."""
        ...


class Ranks:
    """Two ranks with the library of one tree, which save on request."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream: IO[str] = connection.makefile("rw")

    def save(self) -> Figures:
        """Has the ranks save once; returns rank 0's figures.

        Raises:
            RuntimeError: if they have ended.
        """
        self._stream.write("save\n")
        self._stream.flush()
        line = self._stream.readline()
        if not line:
            raise RuntimeError("the ranks ended; their errors are above")
        return json.loads(line)

    def end(self) -> None:
        """Has the ranks end."""
        self._stream.write("end\n")
        self._stream.flush()


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """Checks a commit out, into a folder of its own, while the context is open."""
    git = ["git", "-C", str(REPOSITORY)]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "former"
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)


@contextmanager
def ranks_of(tree: Path, case: Case) -> Iterator[Ranks]:
    """Runs two ranks with a tree's library while the context is open."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        memory = stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY))
        port, turns = str(free_port()), str(listener.getsockname()[1])
        command = [sys.executable, str(SCRIPT), str(tree), memory, turns, "--megabytes", str(case.megabytes)]
        processes = [
            subprocess.Popen(
                [*command, *(["--split"] if case.split else [])],
                env=os.environ
                | QUIET_NETWORK
                | {"PYTHONPATH": str(tree), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                | {"RANK": str(rank), "WORLD_SIZE": str(RANKS)},
            )
            for rank in range(RANKS)
        ]
        try:
            connection = stack.enter_context(_accepted(listener, processes))
            ranks = Ranks(connection)
            yield ranks
            ranks.end()
        except BaseException:
            for process in processes:
                process.kill()
            raise
        finally:
            for process in processes:
                process.wait()


def _accepted(listener: socket.socket, processes: Sequence[subprocess.Popen[bytes]]) -> socket.socket:
    listener.settimeout(1.0)
    while True:
        try:
            return listener.accept()[0]
        except TimeoutError:
            if any(process.poll() is not None for process in processes):
                raise RuntimeError("a rank ended before it saved; its errors are above") from None


def in_turn(present: Saves, former: Saves, *, saves: int) -> list[tuple[Figures, Figures]]:
    """Has both save in turn, with another first in each pair; returns the figures of each pair."""
    for _ in range(ALLOCATING):
        present.save()
        former.save()
    pairs: list[tuple[Figures, Figures]] = []
    for number in range(saves):
        if number % 2:
            before = former.save()
            pairs.append((present.save(), before))
        else:
            now = present.save()
            pairs.append((now, former.save()))
    return pairs


def ratio(pairs: Sequence[tuple[Figures, Figures]], name: str) -> float:
    """How a figure has changed since the former commit: the median over pairs."""
    return statistics.median(now[name] / before[name] for now, before in pairs)


def compare(commit: str, *, gigabytes: float, saves: int, console: Console) -> dict[str, float]:
    """Measures all cases, prints a table, and returns the values of the last line.

    Raises:
        RuntimeError: if ranks end.
    """
    table = Table(title=f"A save, compared with {commit}", title_justify="left")
    for column in ("state", "training stops", "before", "ratio", "finished after", "before", "ratio"):
        table.add_column(column, justify="left" if column == "state" else "right")
    ratios: dict[str, float] = {}
    with tree_of(commit) as tree:
        for case in cases(gigabytes):
            with ranks_of(REPOSITORY, case) as present, ranks_of(tree, case) as former:
                pairs = in_turn(present, former, saves=saves if case.megabytes > 1 else 20 * saves)
            cells: list[str] = []
            for name in ("stall", "finished"):
                times = [statistics.median(one[name] for one in ours) * 1000 for ours in zip(*pairs, strict=True)]
                cells += [*(f"{one:.2f} ms" for one in times), f"{ratio(pairs, name):.3f}"]
            ratios[f"{case.key}_vs_former"] = round(ratio(pairs, "stall"), 3)
            table.add_row(case.name, *cells)
    console.print(table)
    return {"save_vs_former": max(ratios.values()), **ratios}
