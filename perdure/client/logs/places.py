"""Where logs are looked for, besides asking agents."""

from __future__ import annotations

from typing import NamedTuple

from perdure.contract import JobStatus
from perdure.contract.archive import archive_folder, archived_logs
from perdure.spec.base import fill_template


class Copies(NamedTuple):
    """A folder with copies of logs."""

    url: str
    within: str | None = None
    """As for `open_folder`."""


class LogPlaces:
    """All places that a job and its nodes name: what is read there, this process's user may read."""

    reads_files = True
    """Files of this machine are read, of nodes that say that they are on it."""

    def copies_of(self, status: JobStatus) -> Copies | None:
        """The folder to which the logs of a job's nodes were copied; None where it is not read."""
        return Copies(status.logs_url.rstrip("/"))


class ArchiveOnly(LogPlaces):
    """The archive of a reader that answers others.

    Its rights are not theirs: `outputs.logs` is what the author of a specification wished, a joined machine names a
    file as it likes, and both would be opened by this process.

    Args:
        url: The archive, as in `outputs.archive`; None: no copy is read.
    """

    reads_files = False

    def __init__(self, url: str | None) -> None:
        self._url = url

    def copies_of(self, status: JobStatus) -> Copies | None:
        if not self._url or status.logs_url != archived_logs(status.archive):
            return None
        place = fill_template(self._url, name=status.name, namespace=status.namespace)
        return Copies(archived_logs(archive_folder(place, status.namespace, status.name, status.uid)), place)
