"""Opens files in a folder that other users write to, without being led out of it.

Training code can put anything there in place of what its launcher writes: links to files that only the reader may read,
pipes that never end, files without end. So each part of a path is opened from the one before without following links,
only regular files are read, and callers bound what they read.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path, PurePosixPath
from typing import BinaryIO

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Without O_NONBLOCK, opening a pipe waits until another process writes to it."""


class NotARegularFile(OSError):
    """Something else stands where a file should be."""


def open_beneath(folder: Path, name: str | PurePosixPath) -> BinaryIO:
    """Opens a regular file for reading.

    Args:
        folder: The folder; only its last part may not be a link.
        name: The file's path from there.

    Raises:
        NotARegularFile: if it is a link, a folder, a pipe, a socket or a device, or its path goes through a link.
        OSError: if there is none, or it cannot be opened.
    """
    path = PurePosixPath(name)
    *folders, file = path.parts
    if path.is_absolute() or ".." in path.parts:
        raise NotARegularFile(errno.EINVAL, "its path leaves the folder", str(name))
    within = _open(os.fspath(folder), _FOLDER, None)
    try:
        for one in folders:
            inner = _open(one, _FOLDER, within)
            os.close(within)
            within = inner
        descriptor = _open(file, _FILE, within)
    finally:
        os.close(within)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotARegularFile(errno.EINVAL, "it is no regular file", str(name))
    return os.fdopen(descriptor, "rb")


def read_beneath(folder: Path, name: str | PurePosixPath, *, limit: int) -> bytes:
    """Reads a regular file, or the first bytes of a longer one.

    Raises:
        OSError: as `open_beneath` does.
    """
    with open_beneath(folder, name) as file:
        return file.read(limit)


def _open(path: str, flags: int, within: int | None) -> int:
    try:
        return os.open(path, flags, dir_fd=within)
    except OSError as error:
        # ELOOP for a link, ENOTDIR for a link in place of a folder, ENXIO for a socket.
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise NotARegularFile(error.errno, "it is no regular file, or reached through a link", path) from error
        raise
