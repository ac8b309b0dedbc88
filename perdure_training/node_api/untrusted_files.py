"""Opens files in a folder that other users write to, without being led out of it.

Training code can put anything there in place of what its launcher writes: links to files that only the reader may read,
pipes that never end, files without end. So each part of a path is opened from the one before without following links,
only regular files are read, and callers bound what they read. A path begins at the folder that training code cannot
replace the parents of: a node's run directory, and not a folder in it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from perdure_training.node_api.layout import short_links

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Without O_NONBLOCK, opening a pipe waits until another process writes to it."""


class NotARegularFile(OSError):
    """Something else stands where a file should be, or a file of the reader's own."""


def open_beneath(folder: Path, name: str | PurePosixPath) -> BinaryIO:
    """Opens a regular file for reading.

    Args:
        folder: The folder; its last part may not be a link, but for the user's own short ones.
        name: The file's path from there.

    Raises:
        NotARegularFile: if it is a link, a folder, a pipe, a socket or a device, or its path goes through a link; or if
            it is the reader's own file under another name, which others can give to what they may not read.
        OSError: if there is none, or it cannot be opened.
    """
    *folders, file = parts_beneath(name)
    with folder_beneath(folder, folders) as within:
        descriptor = open_file(file, os.O_RDONLY, within)
    known = os.fstat(descriptor)
    if known.st_nlink > 1 and known.st_uid == os.geteuid():
        os.close(descriptor)
        raise NotARegularFile(errno.EINVAL, "it is the reader's own, and has another name", file)
    return os.fdopen(descriptor, "rb")


def read_beneath(folder: Path, name: str | PurePosixPath, *, limit: int) -> bytes:
    """Reads a regular file, or the first bytes of a longer one.

    Raises:
        OSError: as `open_beneath` does.
    """
    with open_beneath(folder, name) as file:
        return file.read(limit)


def read_below(beneath: Path | None, path: Path, *, limit: int) -> bytes:
    """Reads a regular file by its whole path.

    Args:
        beneath: The folder below which nothing is followed; None for the file's own.
        path: The file.
        limit: The maximum number of bytes.

    Raises:
        OSError: as `open_beneath` does.
    """
    folder = beneath or path.parent
    return read_beneath(folder, PurePosixPath(path.relative_to(folder)), limit=limit)


def parts_beneath(name: str | PurePosixPath) -> tuple[str, ...]:
    """Returns the parts of a path.

    Raises:
        NotARegularFile: if it leaves the folder that it begins at.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise NotARegularFile(errno.EINVAL, "its path leaves the folder", str(name))
    return path.parts


@contextmanager
def folder_beneath(folder: Path, parts: Sequence[str] = (), *, create: bool = False) -> Generator[int]:
    """Opens a folder, and the folders in it, one from the other.

    Args:
        folder: Where the path begins. Its last part may not be a link, but for the user's own short ones.
        parts: The names of the folders from there.
        create: Whether to create those that are missing, durably.

    Yields:
        The descriptor of the last one.

    Raises:
        NotARegularFile: if one of them is a link.
        OSError: if one of them cannot be opened.
    """
    within = _open(_behind_short_link(folder), _FOLDER, None)
    try:
        for one in parts:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(one, dir_fd=within)
                    sync_folder(within)
            inner = _open(one, _FOLDER, within)
            os.close(within)
            within = inner
        yield within
    finally:
        os.close(within)


def _behind_short_link(folder: Path) -> str:
    """Returns where one of this user's short links leads; other paths as they are."""
    # A pod's agent has no folder for temporary files, and no short links.
    if folder.is_symlink() and folder.parent == short_links() and not why_not_own(folder.parent):
        return os.readlink(folder)
    return os.fspath(folder)


def open_file(name: str, flags: int, within: int) -> int:
    """Opens a regular file in a folder that is open; a file that is created gets the usual mode.

    Raises:
        NotARegularFile: if it is something else.
        OSError: if it cannot be opened.
    """
    descriptor = _open(name, flags | _FILE, within)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotARegularFile(errno.EINVAL, "it is not a regular file", name)
    return descriptor


def make_own_folder(folder: Path, *, remedy: str) -> None:
    """Makes a folder of this user's in one that all users write to; keeps the one that is there if it is that.

    Raises:
        PermissionError: if it is a link, which another user may have made, or of another user, or others may write to
            it; the message ends with `remedy`.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if problem := why_not_own(folder):
        raise PermissionError(f"{folder} {problem}; {remedy}")


def why_not_own(folder: Path) -> str:
    """Why a path is not a folder that only this user writes to; empty if it is one."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        return "is a link or a file, and no folder"
    if found.st_uid != os.getuid():
        return "belongs to another user"
    return "can be written to by other users" if found.st_mode & 0o022 else ""


def sync_folder(within: int) -> None:
    """Makes the names in an open folder durable, as far as its file system can: some know no such request.

    Raises:
        OSError: if the disk fails.
    """
    try:
        os.fsync(within)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise


def replace_beneath(folder: Path, name: str, content: bytes) -> None:
    """Replaces a file in a folder; a link in its place leads nowhere.

    Raises:
        OSError: if it cannot be written.
    """
    with folder_beneath(folder) as within:
        draft = f".{os.urandom(4).hex()}"
        with os.fdopen(open_file(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, within), "wb") as file:
            file.write(content)
        os.replace(draft, name, src_dir_fd=within, dst_dir_fd=within)


def _open(path: str, flags: int, within: int | None) -> int:
    try:
        return os.open(path, flags, 0o666, dir_fd=within)
    except OSError as error:
        # ELOOP for a link, ENOTDIR for a link in place of a folder, ENXIO for a socket.
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise NotARegularFile(
                error.errno, "it is not a regular file, or it is reached through a link", path
            ) from error
        raise
