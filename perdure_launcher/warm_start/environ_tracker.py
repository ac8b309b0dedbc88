"""Tracks which package reads which variable of `os.environ`: a variable that an import reads must have the rank's
value."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Callable, Generator
from types import FrameType

ALL = "*"
"""Stands for all names: a package iterates over all variables."""

_PATHS = sysconfig.get_paths()
_STANDARD = (_PATHS["stdlib"] + os.sep, _PATHS["platstdlib"] + os.sep)
_INSTALLED = (_PATHS["purelib"] + os.sep, _PATHS["platlib"] + os.sep)


class _TrackedEnviron(os._Environ[str]):
    """An `os.environ` that reports each read."""

    def __getitem__(self, key: str) -> str:
        if not _walks:
            _note_read(key)
        return super().__getitem__(key)

    def __iter__(self) -> Generator[str]:
        _note_read(ALL)
        _walks.append(self)
        try:
            yield from super().__iter__()
        finally:
            _walks.pop()


_walks: list[_TrackedEnviron] = []
"""Iterations over all variables in progress; single reads during them are not reported."""
_notes: list[Callable[[str, str], None]] = []


@contextlib.contextmanager
def track_reads(note: Callable[[str, str], None]) -> Generator[None]:
    """Calls `note` with package and variable for each read of `os.environ` within the context."""
    original = type(os.environ)
    _notes.append(note)
    os.environ.__class__ = _TrackedEnviron
    try:
        yield
    finally:
        os.environ.__class__ = original
        _notes.pop()


def _note_read(name: str) -> None:
    """Reports the reading package: the nearest caller outside of Python's own code, which reads on behalf of others."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _is_pythons_own(frame.f_code.co_filename):
        frame = frame.f_back
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0] if frame is not None else ""
    for note in _notes:
        note(package, name)


def _is_pythons_own(file: str) -> bool:
    return file.startswith("<") or (file.startswith(_STANDARD) and not file.startswith(_INSTALLED))
