"""Counts torch's own events of a node's torchruns, as their file has them, for metrics."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from perdure.base.metrics.samples import Sample
from perdure_training.node_api import layout
from perdure_training.node_api.untrusted_files import open_beneath

_PREFIX: Final = "torchelastic.worker.status."
KINDS: Final = (
    ("RENDEZVOUS", "AGENT"),
    ("START", "WORKER"),
    *((state, source) for state in ("SUCCEEDED", "FAILED", "TERMINATED") for source in ("WORKER", "AGENT")),
)
"""States and sources that are counted: the file belongs to the training code, which could write any others."""
_MOST_AT_ONCE: Final = 4 * 1024 * 1024
"""Bytes that one scrape reads, at most."""
_LONGEST_LINE: Final = 64 * 1024


class TorchEvents:
    """Follows the file across its rotations. Events are missing if it is rotated twice between two readings."""

    name = "torch's events"

    def __init__(self, run_dir: Path) -> None:
        """Creates the object; nothing is opened before it is read.

        Args:
            run_dir: The node's run directory.
        """
        self._run_dir = run_dir
        self._name = f"{layout.EVENTS}/{layout.TORCHRUN_EVENTS}"
        self._file: BinaryIO | None = None
        self._counts: dict[tuple[str, str], int] = dict.fromkeys(KINDS, 0)
        self._times: dict[tuple[str, str], float] = {}

    def read(self) -> Sequence[Sample]:
        """Returns the number of events of each kind and the time of the newest; nothing before the first torchrun."""
        left = _MOST_AT_ONCE
        while left > 0 and self._is_open():
            read = self._read_lines(left)
            # Training code could replace the file without end.
            left -= read or _LONGEST_LINE
            if read == 0 and not self._next_file():
                break
        if self._file is None:
            return ()
        return [
            *(
                Sample("perdure_node_torch_events_total", count, {"event": event, "source": source})
                for (event, source), count in self._counts.items()
            ),
            *(
                Sample("perdure_node_torch_event_time_seconds", time, {"event": event, "source": source})
                for (event, source), time in self._times.items()
            ),
        ]

    def _is_open(self) -> bool:
        if self._file is None:
            try:
                self._file = open_beneath(self._run_dir, self._name)
            except OSError:
                return False
        return True

    def _next_file(self) -> bool:
        """Opens the file that replaced the one that was read to its end; whether there is one."""
        assert self._file is not None
        try:
            newer = open_beneath(self._run_dir, self._name)
        except OSError:
            return False
        if os.path.sameopenfile(newer.fileno(), self._file.fileno()):
            newer.close()
            return False
        self._file.close()
        self._file = newer
        return True

    def _read_lines(self, most: int) -> int:
        """Takes in the complete lines that are there, and returns their bytes."""
        assert self._file is not None
        begin = self._file.tell()
        data = self._file.read(most)
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) > _LONGEST_LINE:
            # No event is as long.
            return len(data)
        self._file.seek(begin + end)
        for line in data[:end].splitlines():
            if len(line) <= _LONGEST_LINE:
                self._take(line)
        return end

    def _take(self, line: bytes) -> None:
        try:
            event: Any = json.loads(line)
            name, time = str(event["name"]), float(event["time"])
            kind = (name.removeprefix(_PREFIX), _source(event))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            return
        if kind in self._counts and math.isfinite(time):
            self._counts[kind] += 1
            self._times[kind] = time


def _source(event: Mapping[str, Any]) -> str:
    attributes = event.get("attributes")
    return str(cast("dict[str, Any]", attributes).get("source")) if isinstance(attributes, dict) else ""
