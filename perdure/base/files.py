"""Files that processes share: records, of which a reader finds the old content or the new one and never a part, and
locks."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import AsyncGenerator, Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

RecordT = TypeVar("RecordT", bound=BaseModel)

_LOCK_INTERVAL = timedelta(milliseconds=50)
"""The time between two attempts to take a lock: short beside what its holders do."""

_WAIT_REPORTS = timedelta(seconds=15)
"""The time between two reports of a wait."""


def write_private_file(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Replaces a file atomically; only its owner can read it, because it may contain an incarnation's token.

    Args:
        path: The file.
        content: All of its new content.
        durable: Whether the content must survive a crash of the machine.

    Raises:
        OSError: if the disk rejects it. The file then keeps its content.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def read_record(path: Path, model: type[RecordT]) -> RecordT | None:
    """Reads a file that holds a record; None if there is none that can be read."""
    try:
        return model.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None


@contextlib.asynccontextmanager
async def exclusive_lock(
    path: Path, work: str, *, report: Callable[[str], None] = lambda _: None
) -> AsyncGenerator[None]:
    """Admits one process at a time. A process that waits reports for whom, and ends its wait when it is cancelled.

    Args:
        path: The lock's file, which names the process that holds it.
        work: What the holder does, for the report, such as `starts the server`.
        report: Is called with a line when the wait begins, and with another every 15 seconds.

    Raises:
        OSError: if the file cannot be written.
    """
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+") as file:
        began, told = time.monotonic(), 0
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            waited = time.monotonic() - began
            if waited >= told * _WAIT_REPORTS.total_seconds():
                told += 1
                report(f"Waiting for {_holder(path)}, which {work} ({waited:.0f} s) ...")
            # The system announces a free lock only to a thread that nothing can interrupt.
            await asyncio.sleep(_LOCK_INTERVAL.total_seconds())
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


def _holder(path: Path) -> str:
    pid = path.read_text(encoding="utf-8").strip()
    return f"process {pid}" if pid else "another process"
