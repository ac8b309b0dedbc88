"""What imports leave behind beside modules, and each rank that imports would have: output and variables."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator

_LARGEST = 1 << 20


class Traces:
    """Keeps them while the warm interpreter imports, and leaves them behind in each rank that is forked."""

    def __init__(self) -> None:
        self._written = {1: b"", 2: b""}
        """By stream; warnings, mostly."""
        self._variables: dict[str, str | None] = {}
        """Set by imports, or removed."""

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        """Keeps what is left behind within, beside what was kept before."""
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
        """Leaves them behind in this process too."""
        for name, value in self._variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for stream, text in self._written.items():
            _write(stream, text)


def changes(before: dict[str, str], after: dict[str, str]) -> dict[str, str | None]:
    """The variables that differ, as they are afterwards; None for those that are gone."""
    return {name: after.get(name) for name in {*before, *after} if before.get(name) != after.get(name)}


def _write(stream: int, text: bytes) -> None:
    with contextlib.suppress(OSError):
        while text:
            text = text[os.write(stream, text) :]
