"""Files in which a rank writes down that devices do not compute the same; the node's agent reads them.

Each rank that may have computed wrongly writes its own file, so that no node accuses another one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from perdure_training.node_api.text import well_formed
from perdure_training.node_api.untrusted_json import finite, is_whole, read_json_below

GRADIENTS = "gradients"
"""A replay of the step has other gradients."""
PARAMETERS = "parameters"
"""The parameters are not those of the other replicas."""
NOT_DETERMINISTIC = "not_deterministic"
"""The step differs with itself on more than one rank, or on all: no device is wrong."""

_KINDS = (GRADIENTS, PARAMETERS, NOT_DETERMINISTIC)
_LONGEST = 8192
"""Bytes that are read: any program may write to the file."""
_MOST = 8
"""Ranks and checksums that are read."""
_LONGEST_TEXT = 200


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """What a check has found."""

    kind: str
    step: int
    """The step that was checked."""
    sound: int | None = None
    """The newest step whose state is known to be sound; None where no check of this process says so."""
    suspects: tuple[int, ...] = ()
    """The global ranks of which one has computed wrongly; one if it is known which."""
    repeats: bool = False
    """The rank's replays are wrong, too."""
    device: str = ""
    checksums: tuple[str, ...] = ()
    """One text for each result, for people."""
    time: float = 0.0


def corruption_path(directory: Path, rank: int) -> Path:
    """Returns the path of a global rank's file, in the folder of progress files."""
    return directory / f"rank-{rank}.corruption"


def write_corruption(path: Path, found: Corruption, *, generation: int) -> None:
    """Replaces the file.

    Raises:
        OSError: if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".corruption-draft")
    draft.write_text(json.dumps({"generation": generation, "found": asdict(found)}), encoding="utf-8")
    draft.replace(path)


def read_corruption(path: Path, *, generation: int, beneath: Path | None = None) -> Corruption | None:
    """Reads what a rank found in a generation; None if there is no file, or if it is malformed.

    Args:
        path: The file.
        generation: The generation; the file of an older one stays.
        beneath: The folder below which no link is followed; by default the file's own.
    """
    try:
        content = read_json_below(beneath, path, limit=_LONGEST)
        return _found(content["found"]) if content["generation"] == generation else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _found(content: dict[str, Any]) -> Corruption:
    """Reads one finding.

    Raises:
        ValueError: if it is malformed.
    """
    kind, step, sound = content["kind"], content["step"], content["sound"]
    suspects = cast("list[object]", content["suspects"])[:_MOST]
    ranks = tuple(rank for rank in suspects if is_whole(rank))
    if kind not in _KINDS or not is_whole(step) or not (sound is None or is_whole(sound)):
        raise ValueError(kind)
    texts = [text for text in cast("list[object]", content["checksums"])[:_MOST] if isinstance(text, str)]
    return Corruption(
        kind=kind,
        step=step,
        sound=sound,
        suspects=cast("tuple[int, ...]", ranks),
        repeats=content["repeats"] is True,
        device=well_formed(str(content["device"])[:_LONGEST_TEXT]),
        checksums=tuple(well_formed(text[:_LONGEST_TEXT]) for text in texts),
        time=finite(content["time"]),
    )
