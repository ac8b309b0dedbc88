"""The two ways to a rank that need not import any more, and when the dearer one is taken.

A *fork* of the warm interpreter shares its memory, is there at once and as often as it is wanted, but has lost every
thread of that interpreter, and its devices. A *standby* is a process of its own, started ahead for one rank and used
once: nothing is lost, since nothing is forked, and it imports with the place that its rank had the last time. It shares
no memory, and each use is followed by another start. So ranks are forked, unless that would leave something out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .names import DEVICES, PLACES_THAT_STAY

_DEVICE_FILES = ("nvidia[0-9]*", "kfd")
"""Of NVIDIA's driver, and of AMD's."""
_NO_DEVICE = ("", "-1")


@dataclass(frozen=True)
class Way:
    """What a rank has of the process that imports for it."""

    same_process: bool
    """It is that process: with its threads, its open files and what it has made of devices."""
    places: frozenset[str]
    """Variables of one rank's place that imports may read: a rank whose own are others does not come this way."""


FORK = Way(same_process=False, places=DEVICES)
STANDBY = Way(same_process=True, places=DEVICES | PLACES_THAT_STAY)


def has_devices(environment: Mapping[str, str], folder: Path = Path("/dev")) -> bool:
    """Whether ranks with this environment may use GPUs. Asks no driver: to wake one here would spoil every fork."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in _NO_DEVICE:
        return False
    return any(next(folder.glob(pattern), None) is not None for pattern in _DEVICE_FILES)


def why_standbys(*, devices: bool, lost_by_forks: Mapping[str, str]) -> str:
    """Why ranks are to have standbys; empty where forks do as well.

    Args:
        devices: Whether ranks may use GPUs. What is imported beside torch may wake their driver without a trace that
            Python can see, and no fork can use it then.
        lost_by_forks: Packages that only a fork cannot carry over, and why.
    """
    if devices:
        return "the node has GPUs, whose driver no fork survives"
    for package, reason in lost_by_forks.items():
        return reason if package in reason else f"{package}: {reason}"
    return ""
