"""Reads and writes records in files that other processes share: a reader finds the old content or the new one, and
never a part of it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

RecordT = TypeVar("RecordT", bound=BaseModel)


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
