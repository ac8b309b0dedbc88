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
from pathlib import Path


class WrongArchive(Exception):
    """The parts differ from what was sent."""


def unpack_workdir(parts: Path, digest: str, folder: Path) -> None:
    """Unpacks an archive.

    Args:
        parts: a folder with the archive's parts, in the order of their names.
        digest: `sha256:` and the digest of the tar file.
        folder: the target folder; existing files are overwritten.

    Raises:
        WrongArchive: if the parts are damaged or incomplete, or contain paths outside of the folder.
    """
    packed = b"".join(part.read_bytes() for part in sorted(parts.iterdir()) if not part.name.startswith("."))
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    with gzip.open(io.BytesIO(packed)) as content:
        reading = _Digesting(content)
        try:
            with tarfile.open(fileobj=reading, mode="r|") as archive:
                archive.extractall(folder, filter=_for_anybody)
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

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        self._hash.update(data)
        return data

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


def _for_anybody(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """Restricts members to the folder, and makes them writable for every user of the pod."""
    safe = tarfile.data_filter(member, folder)
    runs = member.isdir() or bool(member.mode & 0o100)
    return safe.replace(mode=0o777 if runs else 0o666, deep=False)
