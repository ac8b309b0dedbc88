"""Has a forked rank show which generation it belongs to, to those who look at its processes from outside.

What the kernel shows as a process's environment is a part of its memory, as its program was started with it. A fork has
the warm interpreter's, where nothing would tell the daemons of one generation from those of the next. So that one has
room for the number, and a forked rank, with all that it forks, has it written there.
"""

from __future__ import annotations

import ctypes

GENERATION_VARIABLE = "PERDURE_GENERATION"
ROOM = " " * 20
"""The variable's value in a warm interpreter: room for any number."""

_ENVIRONMENT = slice(47, 49)
"""Of the fields in `/proc/self/stat`, from the state on: where the environment begins and ends."""


def show_generation(generation: str) -> None:
    """Writes the number into this process's original environment. What Python and C read of it is elsewhere by now."""
    with open("/proc/self/stat", "rb") as file:
        content = file.read()
    begin, end = map(int, content[content.rindex(b")") + 2 :].split()[_ENVIRONMENT])
    name = f"\0{GENERATION_VARIABLE}=".encode()
    # The byte before belongs to the arguments, and ends them.
    found = ctypes.string_at(begin - 1, end - begin + 1).find(name + ROOM.encode())
    if found >= 0:
        ctypes.memmove(begin - 1 + found + len(name), generation.ljust(len(ROOM)).encode(), len(ROOM))
