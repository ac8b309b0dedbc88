"""Writes a forked rank's generation into its environment as the kernel shows it to other processes.

`/proc/<pid>/environ` shows the memory that held the environment when the program started. A fork has that of the warm
interpreter, which would not distinguish the daemons of one generation from those of the next. So the warm interpreter's
environment reserves space for the number, and a forked rank writes its own there, for itself and all its forks.
"""

from __future__ import annotations

import ctypes

GENERATION_VARIABLE = "PERDURE_GENERATION"
ROOM = " " * 20
"""The variable's value in a warm interpreter: space for any number."""

_ENVIRONMENT = slice(47, 49)
"""The fields in `/proc/self/stat`, counted from the state, with the begin and end of the environment."""


def show_generation(generation: str) -> None:
    """Writes the number into this process's original environment. Python and C have copied it elsewhere by now."""
    with open("/proc/self/stat", "rb") as file:
        content = file.read()
    begin, end = map(int, content[content.rindex(b")") + 2 :].split()[_ENVIRONMENT])
    name = f"\0{GENERATION_VARIABLE}=".encode()
    # The byte before the environment is the terminator of the arguments.
    found = ctypes.string_at(begin - 1, end - begin + 1).find(name + ROOM.encode())
    if found >= 0:
        ctypes.memmove(begin - 1 + found + len(name), generation.ljust(len(ROOM)).encode(), len(ROOM))
