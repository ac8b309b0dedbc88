"""Side effects of imports that each rank would have had itself: output, and environment variables."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator

_LARGEST = 1 << 20


class Traces:
    """Records side effects while the warm interpreter imports, and repeats them in each forked rank."""

    def __init__(self) -> None:
        self._written = {1: b"", 2: b""}
        """Output by stream; mostly warnings."""
        self._variables: dict[str, str | None] = {}
        """Variables that imports have set; None for removed ones."""

    @contextlib.contextmanager
    def record(self) -> Generator[None]:
        """Records the side effects within the context, in addition to earlier ones."""
        before = dict(os.environ)
        own = {stream: os.dup(stream) for stream in self._written}
        kept = {stream: os.memfd_create("written") for stream in self._written}
        for stream, file in kept.items():
            os.dup2(file, stream)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for stream, file in kept.items():
                os.dup2(own[stream], stream)
                os.close(own[stream])
                written = os.pread(file, _LARGEST, 0)
                os.close(file)
                _write(stream, written)
                self._written[stream] += written
            self._variables.update(changes(before, dict(os.environ)))

    def leave(self) -> None:
        """Repeats the recorded side effects in this process."""
        for name, value in self._variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for stream, text in self._written.items():
            _write(stream, text)


def changes(before: dict[str, str], after: dict[str, str]) -> dict[str, str | None]:
    """Returns the variables that differ, with their new values; None for removed ones."""
    return {name: after.get(name) for name in {*before, *after} if before.get(name) != after.get(name)}


def _write(stream: int, text: bytes) -> None:
    with contextlib.suppress(OSError):
        while text:
            text = text[os.write(stream, text) :]
