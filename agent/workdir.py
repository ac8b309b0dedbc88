"""Unpacks the job's code that was copied to a node. Standard library only, like all code that runs before the agent.

The archive is a gzipped tar file in parts. Its digest is that of the tar file, so it does not depend on the compressor.
The user of the training container may change the unpacked files: they are the node's own copy.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zlib
from pathlib import Path, PurePosixPath

LARGEST = 256_000_000
"""The most bytes that the files of an archive have together; clients send no more."""

_LONGEST = 2 * LARGEST
"""The most bytes of the tar file: each file has a header, and its content is padded."""
MOST_FILES = 100_000
"""The most files, folders and links of an archive: empty ones cost no bytes, but inodes of each machine."""


class WrongArchive(Exception):
    """The parts differ from what was sent, or no client of ours has packed them."""


def unpack_workdir(parts: Path, digest: str, folder: Path) -> None:
    """Unpacks an archive.

    Args:
        parts: a folder with the archive's parts, in the order of their names.
        digest: `sha256:` and the digest of the tar file.
        folder: the target folder; existing files are overwritten.

    Raises:
        WrongArchive: if the parts are damaged or incomplete, too large, or contain paths outside of the folder.
    """
    packed = b"".join(part.read_bytes() for part in sorted(parts.iterdir()) if not part.name.startswith("."))
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    with gzip.open(io.BytesIO(packed)) as content:
        reading = _Digesting(content)
        try:
            with tarfile.open(fileobj=reading, mode="r|") as archive:
                archive.extractall(folder, filter=_Members())
            while reading.read(io.DEFAULT_BUFFER_SIZE):
                pass
        except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise WrongArchive(f"the uploaded workdir cannot be unpacked: {error}") from error
    if reading.digest != digest:
        raise WrongArchive(f"the uploaded workdir is damaged: its digest is {reading.digest}, expected {digest}")


class _Digesting(io.RawIOBase):
    """Computes the digest of the data that tarfile reads."""

    def __init__(self, source: gzip.GzipFile) -> None:
        self._source = source
        self._hash = hashlib.sha256()
        self._length = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(min(size, io.DEFAULT_BUFFER_SIZE) if size >= 0 else io.DEFAULT_BUFFER_SIZE)
        self._hash.update(data)
        self._length += len(data)
        if self._length > _LONGEST:
            raise WrongArchive(f"the uploaded workdir has more than {_LONGEST} bytes")
        return data

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


class _Members:
    """Restricts an archive's members to the folder and its limits, and makes them writable for every user of the pod.

    tarfile's own filter resolves links in the folder, which has been deceived before. So no member's path may lead over
    a link of the archive, which no client of ours packs.
    """

    def __init__(self) -> None:
        self._count = 0
        self._size = 0
        self._links: set[PurePosixPath] = set()

    def __call__(self, member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
        self._count += 1
        self._size += member.size
        if self._count > MOST_FILES or self._size > LARGEST:
            raise WrongArchive(f"the uploaded workdir has more than {LARGEST} bytes or {MOST_FILES} files")
        if member.issparse():
            raise WrongArchive(f"the uploaded workdir has a sparse file, {member.name}")
        safe = tarfile.data_filter(member, folder)
        for name in (safe.name, *([safe.linkname] if safe.islnk() else [])):
            path = PurePosixPath(name)
            if ".." in path.parts or not self._links.isdisjoint((path, *path.parents)):
                raise WrongArchive(f"a path of the uploaded workdir follows a link or leaves the folder: {name}")
        if safe.issym():
            self._links.add(PurePosixPath(safe.name))
        runs = member.isdir() or bool(member.mode & 0o100)
        return safe.replace(mode=0o777 if runs else 0o666, deep=False)
