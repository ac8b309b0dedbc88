"""Simulates machines started by a scheduler on this one: `perdure join` in the foreground, repeatedly."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

import psutil

from tests.support.command_line import PERDURE
from tests.system.site import PATIENCE


@dataclass
class Process:
    """One command and what it printed."""

    popen: subprocess.Popen[bytes]
    output: Path

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    async def leave(self, *, within: float = PATIENCE) -> int:
        """Its exit code, once it has left."""
        try:
            return await asyncio.to_thread(self.popen.wait, within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not leave within {within} s: {self.text}") from None

    def signal(self, number: Signals) -> None:
        self.popen.send_signal(number)


class Machines:
    """Whatever runs on the machines of a test."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PERDURE_STATE": str(folder / "joined"), **environment}
        self.started: list[Process] = []

    def start(self, *command: str, environment: Mapping[str, str] | None = None) -> Process:
        output = self.folder / f"output-{len(self.started)}"
        with output.open("wb") as file:
            popen = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**self.environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.started.append(Process(popen, output))
        return self.started[-1]

    def join(self, job: str, node_id: str, *arguments: str) -> Process:
        return self.start(*PERDURE, "join", job, "--node-id", node_id, *arguments)

    def close(self) -> None:
        for process in self.started:
            if process.popen.poll() is None:
                children = psutil.Process(process.popen.pid).children(recursive=True)
                for child in (process.popen, *children):
                    # Any of them may end by itself, or with one that was killed before it.
                    with suppress(psutil.NoSuchProcess):
                        child.kill()
                process.popen.wait()
            print(f"--- {process.popen.args}:\n{process.text}", file=sys.stderr)


@asynccontextmanager
async def machines(folder: Path, environment: Mapping[str, str]) -> AsyncGenerator[Machines]:
    """Machines on which nothing runs any more when the context closes."""
    made = Machines(folder, environment)
    try:
        yield made
    finally:
        made.close()
