"""Packs a folder of code for nodes that cannot see this machine.

The same files make the same archive: times, owners and the order of a folder have no effect. It is meant for code. Data
and environments belong in the image or on a volume, so a folder that is too large is refused, with the names of its
largest parts.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from pathspec import GitIgnoreSpec
from rich.filesize import decimal

from perdure.agent.workdir import LARGEST, MOST_FILES
from perdure.base.words import count
from perdure.spec.capabilities import CAPABILITIES
from perdure.spec.errors import SpecError, SpecProblem, format_value
from perdure.spec.job import JobSpec

MAX_PACKED = 8_000_000
"""The largest compressed archive, in bytes: every node fetches it from the API server."""

LEFT_OUT = (".git/", ".venv/", "__pycache__/")
"""Folders that are never useful elsewhere, unless `exclude` includes one again (`!.git/`)."""

_LATE_ENOUGH = 315_532_800
"""1980-01-01: the first time that zip files, and so wheels, can hold."""
_NAMED = 3
"""The number of the largest files and folders that an error names."""


@dataclass(frozen=True, kw_only=True)
class PackedWorkdir:
    """A folder, packed for sending."""

    content: bytes
    """A gzipped tar archive."""
    digest: str
    """The digest of the tar archive: the compression has no effect on it."""
    files: int
    size: int
    """The total size of its files, in bytes."""

    def __str__(self) -> str:
        return f"{count(self.files, 'file')}, {decimal(self.size)} ({decimal(len(self.content))} compressed)"


@dataclass(frozen=True)
class _Entry:
    path: str
    """The path within the folder, with slashes; a folder's path has no slash at its end."""
    place: str
    """The path on this machine."""
    status: os.stat_result


def pack_workdir_of(job: JobSpec) -> PackedWorkdir | None:
    """Packs the code that has to be uploaded; None if none has to be.

    Raises:
        SpecError: if it cannot be packed.
    """
    workdir = job.workdir
    if not CAPABILITIES[job.backend].uploads_workdir or workdir is None or workdir.archive:
        return None
    return pack_workdir(workdir.path, workdir.exclude)


def pack_workdir(folder: str | Path, exclude: Sequence[str] = ()) -> PackedWorkdir:
    """Packs a folder.

    Args:
        folder: The working directory.
        exclude: Patterns as in .gitignore, after those of `LEFT_OUT`.

    Raises:
        SpecError: if the folder cannot be packed, or is too large.
    """
    root = os.path.realpath(folder)
    if not os.path.isdir(root):
        raise _wrong(format_value(str(folder)), "is not a folder on this machine")
    entries: list[_Entry] = []
    try:
        entries += _walk(root, "", _patterns(exclude))
        size = sum(entry.status.st_size for entry in entries if stat.S_ISREG(entry.status.st_mode))
        if size > LARGEST or len(entries) > MOST_FILES:
            raise _TooLarge
        packed = _Limited()
        with gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=0) as compressed:
            digest = _write(entries, root, compressed)
    except _TooLarge:
        raise _too_large(str(folder), entries) from None
    except OSError as error:
        place = os.path.relpath(error.filename, root) if error.filename else str(folder)
        message = f"{format_value(place)} cannot be read: {error.strerror or error}"
        raise _wrong("", message, "make it readable, or name it in workdir.exclude") from error
    return PackedWorkdir(
        content=packed.getvalue(),
        digest=digest,
        files=sum(not stat.S_ISDIR(entry.status.st_mode) for entry in entries),
        size=size,
    )


def _patterns(exclude: Sequence[str]) -> GitIgnoreSpec:
    for index, pattern in enumerate(exclude):
        try:
            GitIgnoreSpec.from_lines([pattern])
        except ValueError:
            raise SpecError(
                [
                    SpecProblem(
                        location=("workdir", "exclude", index),
                        value=format_value(pattern),
                        expected="a pattern as in .gitignore",
                    )
                ]
            ) from None
    return GitIgnoreSpec.from_lines([*LEFT_OUT, *exclude])


def _walk(root: str, inside: str, patterns: GitIgnoreSpec) -> Iterator[_Entry]:
    """Yields everything that is packed, each folder before its content."""
    with os.scandir(os.path.join(root, inside)) as found:
        items = sorted(found, key=lambda item: os.fsencode(item.name))
    for item in items:
        path = f"{inside}/{item.name}" if inside else item.name
        is_folder = item.is_dir(follow_symlinks=False)
        # As with git, nothing below an excluded folder can be included again.
        if patterns.match_file(f"{path}/" if is_folder else path):
            continue
        status = item.stat(follow_symlinks=False)
        if item.is_symlink():
            _check_link(root, path, item.path)
        elif not is_folder and not item.is_file(follow_symlinks=False):
            raise _wrong(format_value(path), "is neither a file nor a folder nor a link", "name it in workdir.exclude")
        yield _Entry(path, item.path, status)
        if is_folder:
            yield from _walk(root, path, patterns)


def _check_link(root: str, path: str, place: str) -> None:
    """Refuses a link that leads out of the folder, because it means something else on other machines."""
    target = os.readlink(place)
    real = os.path.realpath(place)
    if os.path.isabs(target) or not (real == root or real.startswith(f"{root}/")):
        raise _wrong(
            format_value(path),
            f"is a link to {target}, which nodes do not have",
            "make it a relative link within the folder, put a copy there, or name it in workdir.exclude",
        )


def _write(entries: Sequence[_Entry], root: str, compressed: gzip.GzipFile) -> str:
    """Writes the archive, and returns its digest."""
    content = _Digesting(compressed)
    with tarfile.open(fileobj=cast("IO[bytes]", content), mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            info = tarfile.TarInfo(entry.path)
            info.mtime = _LATE_ENOUGH
            mode = entry.status.st_mode
            info.mode = 0o755 if stat.S_ISDIR(mode) or mode & stat.S_IXUSR else 0o644
            if stat.S_ISLNK(mode):
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, os.readlink(entry.place), 0o777
                archive.addfile(info)
            elif stat.S_ISDIR(mode):
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
            else:
                with open(entry.place, "rb") as file:
                    info.size = os.fstat(file.fileno()).st_size
                    try:
                        archive.addfile(info, file)
                    except OSError as error:
                        why = error.strerror or "it became shorter while it was packed"
                        raise OSError(error.errno, why, entry.place) from error
    return content.digest


class _TooLarge(Exception):
    """Signals that a limit is exceeded."""


class _Limited(io.BytesIO):
    """Stops packing at the limit: the folder may hold a disk full of data."""

    def write(self, data: bytes, /) -> int:  # pyrefly: ignore[bad-override]
        if self.tell() + len(data) > MAX_PACKED:
            raise _TooLarge
        return super().write(data)


class _Digesting:
    """Passes on the bytes that tarfile writes, and computes their digest."""

    def __init__(self, sink: gzip.GzipFile) -> None:
        self._sink = sink
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        return self._sink.write(data)

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


def _too_large(folder: str, entries: Sequence[_Entry]) -> SpecError:
    files: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    for entry in entries:
        if stat.S_ISREG(entry.status.st_mode):
            files[entry.path] = entry.status.st_size
            top, below, _ = entry.path.partition("/")
            if below:
                folders[f"{top}/"] += entry.status.st_size
    largest = [
        f"{path} ({decimal(size)})" for counted in (folders, files) for path, size in counted.most_common(_NAMED)
    ]
    return _wrong(
        "",
        f"{folder} is too large to be uploaded: {decimal(files.total())} in {len(files)} files; the largest: "
        + ", ".join(largest),
        "name what the command does not need in workdir.exclude; put data and packages into the image or on a volume",
        expected=f"at most {decimal(MAX_PACKED)} compressed, and {decimal(LARGEST)} and {MOST_FILES:,} files unpacked",
    )


def _wrong(value: str, message: str, hint: str = "", *, expected: str = "") -> SpecError:
    text = f"{value} {message}".strip()
    return SpecError([SpecProblem(location=("workdir", "path"), message=text, expected=expected, hint=hint)])
