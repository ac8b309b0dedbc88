"""Parses a command that is a Python program: its interpreter and arguments.

It accepts only unambiguous commands: a warm interpreter started for one must load our `sitecustomize` before the
script. So it rejects wrappers in place of Python, and options that keep Python from loading that module.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_HARMLESS = frozenset({"-u", "-B", "-O", "-OO", "-b", "-bb", "-q", "-P"})
_PROGRAM_FOLLOWS = frozenset({"-m", "-c"})
_ELF = b"\x7fELF"


@dataclass(frozen=True)
class PythonCommand:
    """A command that is a Python program."""

    python: str
    """The interpreter's path."""
    arguments: tuple[str, ...]
    """Python's options, the script, and the script's arguments."""


def python_command(command: Sequence[str], *, path: str, workdir: Path) -> PythonCommand | None:
    """Parses the command; None if it is not a Python program or is ambiguous."""
    if len(command) < 2 or not Path(command[0]).name.startswith("python"):
        return None
    # A path with a slash is relative to the command's working directory.
    program = command[0] if "/" in command[0] else shutil.which(command[0], path=path)
    if program is None or not _is_binary(workdir / program):
        return None
    words = iter(command[1:])
    first = next((word for word in words if word not in _HARMLESS), "-")
    if first.startswith("-") and not (first in _PROGRAM_FOLLOWS and next(words, "")):
        return None
    return PythonCommand(str(workdir / program), tuple(command[1:]))


def _is_binary(program: Path) -> bool:
    try:
        with program.open("rb") as file:
            return file.read(len(_ELF)) == _ELF
    except OSError:
        return False
