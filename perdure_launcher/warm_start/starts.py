"""Reads the records of how each rank of this node was last started, for `perdure explain`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from perdure_training.node_api.text import well_formed
from perdure_training.node_api.untrusted_files import read_below
from perdure_training.node_api.untrusted_json import read_json_below

from .names import ALL_COLD, STANDBYS, START_PREFIX

_LONGEST = 64 * 1024
"""Bytes of a record, at most: ranks can write to the folder."""


@dataclass(frozen=True)
class Start:
    """The start of one rank."""

    generation: int
    pid: int
    """The PID of the rank itself; torchrun knows that of the shim."""
    warm: bool
    reason: str = ""
    """Why the start was cold, or why it used a standby."""
    standby: bool = False
    """Whether the rank was a standby and not a fork."""


def record_all_cold(folder: Path, reason: str) -> None:
    """Records why ranks are started without the shim, which would otherwise record it for each rank."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ALL_COLD).write_text(well_formed(reason), encoding="utf-8")


def read_why_all_cold(folder: Path, *, beneath: Path | None = None) -> str:
    """Returns why ranks are started without the shim; empty if they use it, or warm starts are disabled.

    Args:
        folder: The folder of warm starts.
        beneath: The folder below which no link is followed; by default that one.
    """
    try:
        return read_below(beneath, folder / ALL_COLD, limit=_LONGEST).decode(errors="replace")
    except OSError:
        return ""


def read_start(folder: Path, local_rank: int, *, beneath: Path | None = None) -> Start | None:
    """Returns a rank's last start; None if it was not started through the shim. `beneath` is as above."""
    try:
        start = Start(**read_json_below(beneath, folder / f"{START_PREFIX}{local_rank}", limit=_LONGEST))
        return replace(start, reason=well_formed(start.reason))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def lacks_standbys(folder: Path, *, processes: int) -> bool:
    """Returns whether some of this many ranks need standbys that are not ready yet."""
    try:
        said = read_json_below(None, folder / STANDBYS, limit=_LONGEST)
    except (OSError, ValueError):
        return False
    return not said["failure"] and len(said["ready"]) < processes


def read_starts(folder: Path, *, generation: int, processes: int, beneath: Path | None = None) -> list[Start]:
    """Returns the recorded starts of this generation's local ranks; `beneath` is as above."""
    starts = (read_start(folder, local_rank, beneath=beneath) for local_rank in range(processes))
    return [start for start in starts if start is not None and start.generation == generation]
