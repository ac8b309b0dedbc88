"""The event file of this process, if Perdure started it as a rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from perdure_training.events.background import AsyncExporter
from perdure_training.events.exporter import ConsoleExporter
from perdure_training.events.files import FileExporter
from perdure_training.node_api.local_rank import local_rank_of
from perdure_training.node_api.rank_environment import GENERATION_VARIABLE, RUN_ID_VARIABLE, is_rank, run_directory_of

logger = logging.getLogger(__name__)

VARIABLE = "PERDURE_EVENTS"
"""Where ranks write their events: `file` (the default), `console`, `otlp`, several with commas between them, or
`off`."""
FOLDER = "events"
"""The folder of event files, in the node's run directory."""


_ENDPOINTS = ("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@dataclass(frozen=True)
class Place:
    """Where the events of a process go, and the rank that it is."""

    exporters: tuple[AsyncExporter, ...] = ()
    """Without any, events are left out at once."""
    rank: int | None = None
    generation: int | None = None
    """The generation of the world that the process belongs to."""


def rank_file(run_directory: Path, local_rank: int) -> Path:
    """Returns the event file of a rank.

    It is named by the local rank, since a node may have many global ranks in the course of a job, and its folder has a
    size limit.
    """
    return run_directory / FOLDER / f"local-rank-{local_rank}.jsonl"


def find_place(environment: Mapping[str, str] = os.environ) -> Place:
    """Returns where the events of a process with this environment go: nowhere if Perdure did not start it as a rank."""
    place = environment.get(VARIABLE, "file")
    run_directory, rank = run_directory_of(environment), environment.get("RANK", "")
    if run_directory is None or not is_rank(environment) or not rank.isdecimal() or place == "off":
        return Place()
    generation = environment.get(GENERATION_VARIABLE, "")
    path = rank_file(run_directory, local_rank_of(environment))
    exporters = (_exporter(one.strip(), path, environment) for one in place.split(","))
    found = tuple(exporter for exporter in exporters if exporter is not None)
    return Place(found, int(rank), int(generation) if generation.isdecimal() else None)


def _exporter(name: str, path: Path, environment: Mapping[str, str]) -> AsyncExporter | None:
    match name:
        case "console":
            return AsyncExporter(ConsoleExporter())
        case "otlp":
            collector = to_collector(environment, resource={"perdure.job.uid": environment.get(RUN_ID_VARIABLE, "")})
            if collector is None:
                logger.warning("%s=otlp: OTEL_EXPORTER_OTLP_ENDPOINT names no collector that can be used", VARIABLE)
            return collector
        case _:
            if name != "file":
                known = "file, console, otlp or off"
                logger.warning("%s=%s: expected %s; events are written to files", VARIABLE, name, known)
            return AsyncExporter(FileExporter(path))


def to_collector(
    environment: Mapping[str, str] = os.environ, *, resource: Mapping[str, str] | None = None
) -> AsyncExporter | None:
    """Returns an exporter to the collector that OpenTelemetry's variables name; None if they name none, or cannot be
    used, which is logged.

    Args:
        environment: The variables.
        resource: Attributes of what sends the events.
    """
    if not any(environment.get(name) for name in _ENDPOINTS):
        return None
    # What it imports takes a moment, in every rank.
    from perdure_training.events.otlp import exporter_to_collector

    return exporter_to_collector(environment, resource=resource)


class _Own:
    """This process's place, found when it is first needed."""

    def __init__(self) -> None:
        self._found: Place | None = None

    def get(self) -> Place:
        if self._found is None:
            self._found = find_place()
        return self._found

    def forget(self) -> None:
        """Has the place found again: a warm interpreter becomes a rank by a fork."""
        self._found = None


_own = _Own()
os.register_at_fork(after_in_child=_own.forget)


def own_place() -> Place:
    """Returns where the events of this process go; the same exporters each time."""
    return _own.get()
