"""Where recorded histories lie, and how they are written and read.

A file is the history of one run of one workflow, as JSON as the Temporal CLI and UI have it, compressed. Its name tells
the release, the scenario, and which workflow it is.
"""

from __future__ import annotations

import gzip
from pathlib import Path

from temporalio.client import WorkflowHistory

RECORDED = Path(__file__).with_name("recorded")


def recorded_files() -> list[Path]:
    """Every recorded history, of every release."""
    return sorted(RECORDED.glob("*/*.json.gz"))


def write(path: Path, history: WorkflowHistory) -> None:
    """The same history makes the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(history.to_json().encode(), mtime=0))


def read(path: Path) -> WorkflowHistory:
    """The history with its workflow's own ID, which names of children are made of."""
    history = WorkflowHistory.from_json(path.stem, gzip.decompress(path.read_bytes()).decode())
    workflow_id = history.events[0].workflow_execution_started_event_attributes.workflow_id
    return WorkflowHistory(workflow_id=workflow_id, events=history.events)
