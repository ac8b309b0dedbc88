"""Checks of machines before they take part."""

from __future__ import annotations

from enum import StrEnum


class Preflight(StrEnum):
    """Checks of each new node's machine, before the node is taken into a world."""

    OFF = "off"
    """None."""
    QUICK = "quick"
    """Those that take a fraction of a second: processor, memory, folders, names, clock."""
    FULL = "full"
    """The same, and its devices, which takes an import of torch."""
