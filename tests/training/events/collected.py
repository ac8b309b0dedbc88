"""Exporters and readers for tests of events."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perdure_training.events import Event, Exporter

ROOT = Path(__file__).parents[3]


class Collected(Exporter):
    """Keeps all events; `gate` is open unless a test closes it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.error: BaseException | None = None

    def export(self, events: Sequence[Event]) -> None:
        self.entered.set()
        self.gate.wait()
        if self.error is not None:
            raise self.error
        self.events += events

    @property
    def names(self) -> list[str]:
        return [event.name for event in self.events]


def lines(path: Path) -> list[dict[str, Any]]:
    """The events of a file and of those that it was renamed to, oldest first."""
    older = sorted(path.parent.glob(f"{path.name}.*"), key=lambda file: -int(file.suffix[1:]))
    files = [*older, *([path] if path.exists() else [])]
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def run(script: str, *arguments: object, code: int = 0, **environment: str) -> str:
    """Runs a script that may import the library; returns its output."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    return done.stdout
