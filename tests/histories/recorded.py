"""Finds, writes and reads recorded histories.

A file is the history of one run of one workflow, compressed, as JSON in the format of the Temporal CLI and UI. Its name
contains the release, the scenario, and the workflow. Those of the release in work change with it. They are frozen when
it is made: `SHA256SUMS` beside them has their digests, in the format of `sha256sum --check`.
"""

from __future__ import annotations

import gzip
from hashlib import sha256
from pathlib import Path

from temporalio.client import WorkflowHistory

RECORDED = Path(__file__).with_name("recorded")
MANIFEST = "SHA256SUMS"


def releases() -> list[Path]:
    """The folder of each release whose histories are recorded."""
    return sorted(path for path in RECORDED.iterdir() if path.is_dir())


def recorded_files() -> list[Path]:
    """Every recorded history, of every release."""
    return sorted(RECORDED.glob("*/*.json.gz"))


def digests(release: Path) -> str:
    """Returns the content of a release's manifest: a line for each of its recordings."""
    return "".join(
        f"{sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(release.glob("*.json.gz"))
    )


def freeze(release: Path) -> None:
    """Writes the manifest of a release's recordings."""
    (release / MANIFEST).write_text(digests(release))


def write(path: Path, history: WorkflowHistory) -> None:
    """The same history makes the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(history.to_json().encode(), mtime=0))


def read(path: Path) -> WorkflowHistory:
    """The history with its workflow's own ID, which names of children are made of."""
    history = WorkflowHistory.from_json(path.stem, gzip.decompress(path.read_bytes()).decode())
    workflow_id = history.events[0].workflow_execution_started_event_attributes.workflow_id
    return WorkflowHistory(workflow_id=workflow_id, events=history.events)
