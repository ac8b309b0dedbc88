"""What rank 0 and the launcher learn of the desired state of the node's checkpoints: a small file that they poll."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

from perdure.agent.state import AgentState
from perdure_training.node_api.layout import CHECKPOINT_DESIRED
from perdure_training.node_api.untrusted_files import replace_beneath


def desired_of(state: AgentState) -> dict[str, float]:
    """The content of the file, as `StorageLink.desired` describes it."""
    committed, copies, hold = state.committed, state.copies, state.hold
    content: dict[str, float | None] = {
        "request": state.checkpoint_request or None,
        "answered": (committed.answers or None) if committed is not None else None,
        "interval_s": committed.interval.total_seconds() if committed is not None and committed.interval else None,
        "hold": hold.number if hold is not None else None,
        "hold_generation": hold.generation if hold is not None else None,
        "hold_resizes": 1 if hold is not None and hold.resizes else None,
        "hold_copies": 1 if hold is not None and hold.copies else None,
        "hold_stores": (hold.stores or None) if hold is not None else None,
        "hold_within_s": (hold.within.total_seconds() or None) if hold is not None else None,
        "place": zlib.crc32(copies.place.encode()) if copies is not None else None,
    }
    return {name: value for name, value in content.items() if value is not None}


def write_desired(run_directory: Path, content: Mapping[str, float]) -> None:
    """Replaces the file.

    Raises:
        OSError: if it cannot be written.
    """
    replace_beneath(run_directory, CHECKPOINT_DESIRED, json.dumps(content).encode())
