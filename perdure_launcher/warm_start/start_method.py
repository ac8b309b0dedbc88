"""Start methods of warm ranks: fork or standby, and when the more expensive one is used.

A *fork* of the warm interpreter shares its memory, is available at once and any number of times, but lacks the
interpreter's threads and devices. A *standby* is a separate process, started in advance for one rank and used once. It
lacks nothing, because nothing is forked, and it imports with the variables that its rank had the last time. But it
shares no memory, and each use requires another start. So ranks are forked, unless a fork would lack something.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .names import DEVICES, PLACES_THAT_STAY

_DEVICE_FILES = ("nvidia[0-9]*", "kfd")
"""Device files of NVIDIA's driver, and of AMD's."""
_NO_DEVICE = ("", "-1")


@dataclass(frozen=True)
class StartMethod:
    """A start method: what a rank inherits from the process that imported for it."""

    same_process: bool
    """Whether the rank is that process, with its threads, open files and device state."""
    places: frozenset[str]
    """Rank variables that imports may read. A rank with other values of these is not started by this method."""


FORK = StartMethod(same_process=False, places=DEVICES)
STANDBY = StartMethod(same_process=True, places=DEVICES | PLACES_THAT_STAY)


def has_devices(environment: Mapping[str, str], folder: Path = Path("/dev")) -> bool:
    """Returns whether ranks with this environment may use GPUs. It calls no driver: an initialized driver would break
    every fork."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in _NO_DEVICE:
        return False
    return any(next(folder.glob(pattern), None) is not None for pattern in _DEVICE_FILES)


def why_standbys(*, devices: bool, lost_by_forks: Mapping[str, str]) -> str:
    """Returns why ranks need standbys; empty if forks suffice.

    Args:
        devices: Whether ranks may use GPUs. Imports may initialize their driver without a trace that Python can see,
            and no fork could use it then.
        lost_by_forks: Packages that only forks cannot carry over, and why.
    """
    if devices:
        return "the node has GPUs, whose driver no fork survives"
    for package, reason in lost_by_forks.items():
        return reason if package in reason else f"{package}: {reason}"
    return ""
