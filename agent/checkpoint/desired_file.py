"""What rank 0 and the launcher learn of the desired state of the node's checkpoints: a small file that they poll."""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Mapping
from pathlib import Path

from perdure.agent.state import AgentState
from perdure_training.node_api.layout import CHECKPOINT_DESIRED
from perdure_training.node_api.untrusted_files import folder_beneath, open_file


def desired_of(state: AgentState) -> dict[str, float]:
    """The content of the file, as `StorageLink.desired` describes it."""
    committed, copies = state.committed, state.copies
    content: dict[str, float | None] = {
        "request": state.checkpoint_request or None,
        "answered": (committed.answers or None) if committed is not None else None,
        "interval_s": committed.interval.total_seconds() if committed is not None and committed.interval else None,
        "place": zlib.crc32(copies.place.encode()) if copies is not None else None,
    }
    return {name: value for name, value in content.items() if value is not None}


def write_desired(run_directory: Path, content: Mapping[str, float]) -> None:
    """Replaces the file.

    Raises:
        OSError: if it cannot be written.
    """
    # Others may write to this folder: a link leads the agent nowhere.
    with folder_beneath(run_directory) as within:
        draft = f".{secrets.token_hex(4)}"
        with os.fdopen(open_file(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, within), "wb") as file:
            file.write(json.dumps(content).encode())
        os.replace(draft, CHECKPOINT_DESIRED, src_dir_fd=within, dst_dir_fd=within)
