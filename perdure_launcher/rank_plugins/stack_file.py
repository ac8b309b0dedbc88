"""The name of the file into which a rank writes its stacks, which tells the process: for all that know ranks by it."""

from __future__ import annotations

from typing import NamedTuple, Self


class StackFile(NamedTuple):
    """The process that answers into a file, as the file's name tells it."""

    generation: int
    rank: int
    """The global rank."""
    pid: int
    start_ticks: int
    """When the process began: another one may get its PID later."""

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Reads a file's name; None if it is not one of these."""
        parts = name.split(".")
        if len(parts) != len(cls._fields) or not all(part.isdecimal() and len(part) < 20 for part in parts):
            return None
        return cls(*map(int, parts))

    @property
    def name(self) -> str:
        return ".".join(map(str, self))

    @property
    def socket(self) -> str:
        """The name of the socket over which the process tells its collectives."""
        return f"{self.name}.collectives"
