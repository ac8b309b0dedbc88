"""How each rank of this node was started last, read back for `explain`."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from ..agent_link.encoding import well_formed
from .names import ALL_COLD, STANDBYS, START_PREFIX


@dataclass(frozen=True)
class Start:
    """One rank's start."""

    generation: int
    pid: int
    """The rank's own; torchrun knows that of the stand-in."""
    warm: bool
    reason: str = ""
    """Why it was not warm, or why it was a standby."""
    standby: bool = False
    """It was started ahead, and not forked."""


def say_all_cold(folder: Path, reason: str) -> None:
    """Writes down why ranks are started without the stand-in, which would report it for each."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ALL_COLD).write_text(well_formed(reason), encoding="utf-8")


def read_why_all_cold(folder: Path) -> str:
    """Empty where ranks are started through the stand-in, or warm starts are turned off."""
    try:
        return (folder / ALL_COLD).read_text(encoding="utf-8")
    except OSError:
        return ""


def read_start(folder: Path, local_rank: int) -> Start | None:
    """How a rank was started last; None where it was not through the stand-in."""
    try:
        start = Start(**json.loads((folder / f"{START_PREFIX}{local_rank}").read_text(encoding="utf-8")))
        return replace(start, reason=well_formed(start.reason))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def lacks_standbys(folder: Path, *, processes: int) -> bool:
    """Whether some of so many ranks are to have standbys that do not wait yet."""
    try:
        said = json.loads((folder / STANDBYS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return not said["failure"] and len(said["ready"]) < processes


def read_starts(folder: Path, *, generation: int, processes: int) -> list[Start]:
    """The starts of this generation's local ranks, as far as they are written."""
    starts = (read_start(folder, local_rank) for local_rank in range(processes))
    return [start for start in starts if start is not None and start.generation == generation]
