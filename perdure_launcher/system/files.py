"""Writes files that other processes read: a reader finds the old content or the new one, and never a part of it."""

from __future__ import annotations

import contextlib
import os


def write_file(path: str | os.PathLike[str], content: str, *, durable: bool = False) -> None:
    """Replaces a file atomically.

    Args:
        path: The file.
        content: All of its new content.
        durable: Whether the content must survive a crash of the machine.

    Raises:
        OSError: if the disk rejects it. The file then keeps its content.
    """
    draft = f"{os.fspath(path)}.{os.getpid()}.new"
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
