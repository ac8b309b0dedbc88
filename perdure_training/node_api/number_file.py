"""Files with the first numbers of a rank that are not finite, or far too high: a progress file has its newest loss.

The agent looks twice a second, and a rank that trains on has made many steps by then. So the rank that notices such a
number writes it down at once. A rank whose numbers are finite has no such file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from perdure_training.node_api.text import well_formed
from perdure_training.node_api.untrusted_json import finite, is_whole, read_json_below

LOSS = "loss"
GRADIENT_NORM = "grad_norm"
SPIKES = {LOSS: "loss_spike", GRADIENT_NORM: "grad_norm_spike"}
"""The names of finite numbers that are far above what they usually are."""

_NAMES = (LOSS, GRADIENT_NORM, *SPIKES.values())

_LONGEST = 4096
"""Bytes that are read: any program may write to the file."""
_MOST_SAMPLES = 8
_LONGEST_TEXT = 120
_LONGEST_VALUE = 60


@dataclass(frozen=True, kw_only=True)
class FoundNumber:
    """The first number of one name."""

    name: str
    """`LOSS` or `GRADIENT_NORM` where it is not finite, or one of `SPIKES`."""
    value: str
    """As text, since JSON has no number that is not finite: `nan`, `inf` or `-inf`."""
    step: int
    last_finite: int | None = None
    """The newest step before it whose loss was finite; None if this process has reported none."""
    time: float = 0.0
    samples: tuple[str, ...] = ()
    """The samples that the rank had when it found the number, one text for each leased dataset."""


def number_path(directory: Path, rank: int) -> Path:
    """Returns the path of a global rank's file, in the folder of progress files."""
    return directory / f"rank-{rank}.numbers"


def write_numbers(path: Path, found: Sequence[FoundNumber], *, generation: int) -> None:
    """Replaces the file.

    Raises:
        OSError: if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"generation": generation, "found": [asdict(one) for one in found]}), encoding="utf-8")
    draft.replace(path)


def read_numbers(path: Path, *, generation: int, beneath: Path | None = None) -> tuple[FoundNumber, ...]:
    """Reads the numbers that a rank found in a generation; none if there is no file, or if it is malformed.

    Args:
        path: The file.
        generation: The generation; the file of an older one stays until the rank finds another number.
        beneath: The folder below which no link is followed; by default the file's own.
    """
    try:
        content = read_json_below(beneath, path, limit=_LONGEST)
        if content["generation"] != generation:
            return ()
        return tuple(_found(one) for one in content["found"][: len(_NAMES)])
    except (OSError, ValueError, TypeError, KeyError):
        return ()


def _found(content: dict[str, Any]) -> FoundNumber:
    """Reads one number.

    Raises:
        ValueError: if it is malformed.
    """
    name, step, last, time = (content[key] for key in ("name", "step", "last_finite", "time"))
    if name not in _NAMES or not is_whole(step) or not (last is None or is_whole(last)):
        raise ValueError(name)
    samples = [text for text in cast("list[object]", content["samples"])[:_MOST_SAMPLES] if isinstance(text, str)]
    return FoundNumber(
        name=name,
        value=well_formed(str(content["value"])[:_LONGEST_VALUE]),
        step=step,
        last_finite=last,
        time=finite(time),
        samples=tuple(well_formed(text[:_LONGEST_TEXT]) for text in samples),
    )
