"""Reads jobs from their archives, for which neither Temporal nor a node is needed: see `perdure.contract.archive`."""

from __future__ import annotations

import builtins
import re
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import Any, NoReturn, Self, TypeVar

from pydantic import ValidationError

from perdure.base.errors import JobNotFound, PerdureError, Refused
from perdure.client.client import Client
from perdure.client.connection import Endpoint
from perdure.client.logs import LogLine, Selection, read_copies
from perdure.client.logs.copies import CopiedLog
from perdure.client.storage import at_storage, open_folder
from perdure.client.views import FailingActivity, JobSummary, Pause, TaskFailure, closed
from perdure.contract import (
    ArchivedJob,
    ArchivedRole,
    ArchiveReport,
    DatasetView,
    IncidentView,
    JobStatus,
    NodeView,
    NotifierReport,
)
from perdure.contract.archive import ARCHIVED_JOB, FORMAT, archived_logs
from perdure.spec.base import fill_template
from perdure.spec.errors import SpecError
from perdure.spec.validate import refuse_large

_AT_ONCE = 16
"""Requests to a storage at a time."""
_LARGEST = 32 * 1024 * 1024
"""Bytes of a record, at most: several times what a job of thousands of nodes has. Others may write to an archive."""
_MOST_OBJECTS = 250_000
"""Objects and lists of a record, at most: a few times as many as 2,000 nodes of eight ranks have. Each takes up to 50
times its bytes of memory when it is read."""
_MOST_VALUES = 2_000_000
"""Values of a record, at most, by the same measure."""
_MOST = {"incidents": 1_000, "nodes": 20_000, "roles": 1_000, "datasets": 1_000}
"""Parts of a record, at most: many times as many as the largest jobs have. What shows a job takes up to a third of a
millisecond for each, and may serve others, too."""
_Result = TypeVar("_Result")
_NODE = re.compile(r"(?P<role>.+)-(?P<rank>\d+)")


class ArchivedJobs(Client):
    """Answers what a client answers about jobs that have ended, from a folder in which they were archived.

    Args:
        url: The folder, as in `outputs.archive`; `${job.name}` and `${job.namespace}` are filled in.
        namespace: The jobs' namespace, for calls that do not name one.
        for_others: It answers others, whose rights are not this process's: only what is in the archive itself is read,
            and no link in it is followed.
    """

    def __init__(self, url: str, *, namespace: str = "default", for_others: bool = False) -> None:
        super().__init__(namespace=namespace, endpoint=Endpoint(address="", ui=""))
        self._url = url
        self._for_others = for_others
        self._known: dict[tuple[str, str], tuple[str, ArchivedJob]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def connect(self) -> NoReturn:
        """Refuses what an archive cannot do.

        Raises:
            Refused: always.
        """
        raise Refused("jobs of an archive have ended, and cannot be changed or asked")

    async def archived(self, name: str, *, namespace: str | None = None) -> ArchivedJob:
        """What is kept of a job; of several runs the newest.

        Raises:
            JobNotFound: if the archive has no such job.
            PerdureError: if it cannot be read.
        """
        return (await self._find(name, namespace))[1]

    async def list(
        self, *, namespace: str | None = None, everywhere: bool = False, running: bool = False, limit: int = 100
    ) -> builtins.list[JobSummary]:
        jobs, _ = await self.kept(namespace=namespace, everywhere=everywhere, running=running)
        return list(jobs[:limit])

    async def kept(
        self, *, namespace: str | None = None, everywhere: bool = False, running: bool = False
    ) -> tuple[Sequence[JobSummary], Sequence[str]]:
        """Returns the jobs that are kept, the newest first; of several runs with one name, the newest.

        Args:
            namespace: Only jobs of this namespace.
            everywhere: Jobs of all namespaces.
            running: Only jobs of which the archive has only how they began.

        Returns:
            The jobs, and why which records cannot be read.

        Raises:
            PerdureError: if there is no such place, or it cannot be read.
        """
        chosen = None if everywhere else namespace or self.namespace
        jobs, problems = await self._read(partial(_all, self._url, chosen))
        newest: dict[tuple[str, str], JobSummary] = {}
        for job in sorted(jobs, key=lambda one: one.started_at, reverse=True):
            newest.setdefault((job.namespace, job.name), job)
        return [job for job in newest.values() if not (running and job.finished_at)], problems

    async def describe(self, name: str, *, namespace: str | None = None) -> JobSummary:
        return summary_of(await self.archived(name, namespace=namespace))

    async def look(
        self, name: str, *, namespace: str | None = None, role: str | None = None
    ) -> tuple[JobStatus, tuple[NodeView, ...]]:
        record = await self.archived(name, namespace=namespace)
        found = _role_of(record, role)
        return found.status, found.nodes

    async def status(self, name: str, *, namespace: str | None = None, role: str | None = None) -> JobStatus:
        return (await self.look(name, namespace=namespace, role=role))[0]

    async def incidents(self, name: str, *, namespace: str | None = None) -> builtins.list[IncidentView]:
        return list((await self.archived(name, namespace=namespace)).incidents)

    async def datasets(self, status: JobStatus) -> Mapping[str, DatasetView]:
        return (await self.archived(status.name, namespace=status.namespace)).datasets

    async def archive(self, status: JobStatus) -> ArchiveReport:
        folder, record = await self._find(status.name, status.namespace)
        return ArchiveReport(folder=folder, complete_at=record.written_at)

    async def notifications(self, job: JobStatus) -> NotifierReport:
        """Empty: they are not kept."""
        return NotifierReport()

    async def pauses(self, name: str, *, namespace: str | None = None) -> tuple[Pause, ...]:
        return ()

    async def task_failures(self, name: str, *, namespace: str | None = None) -> tuple[TaskFailure, ...]:
        return ()

    async def failing_activities(self, name: str, *, namespace: str | None = None) -> tuple[FailingActivity, ...]:
        return ()

    async def troubles(
        self, status: JobStatus
    ) -> tuple[tuple[Pause, ...], tuple[TaskFailure, ...], tuple[FailingActivity, ...]]:
        return (), (), ()

    async def logs(
        self,
        name: str,
        *,
        namespace: str | None = None,
        node: int | Collection[int] | None = None,
        role: str | None = None,
        incarnation: int | None = None,
        follow: bool = False,
        tail: int | None = None,
        since: datetime | None = None,
    ) -> AsyncGenerator[LogLine]:
        """Yields the lines of all nodes that are kept, also of those that were replaced."""
        folder, record = await self._find(name, namespace)
        if role is not None:
            _role_of(record, role)
        nodes = (node,) if isinstance(node, int) else node
        chosen = Selection(nodes=None if nodes is None else frozenset(nodes), incarnation=incarnation)
        place = archived_logs(folder) if self._for_others else _logs_of(record, folder)
        within = self._within(name, namespace)
        found = {
            (of_role, rank, number): CopiedLog(
                f"{place}/{of_role}-{rank}/{number}",
                rank=rank,
                incarnation=number,
                in_archive=place == archived_logs(folder),
                within=within,
            )
            for of_role, rank, number in await self._read(partial(_kept_logs, place, within))
            if chosen.includes(rank, number) and role in (None, of_role)
        }
        if not found:
            raise PerdureError(
                f"{place} has no such log of {name}",
                remedy="Nodes that ended before their agent first wrote to it have none: perdure nodes shows them.",
            )
        async for line in read_copies(found, tail=tail, since=since):
            yield line

    async def _find(self, name: str, namespace: str | None) -> tuple[str, ArchivedJob]:
        key = (namespace or self.namespace, name)
        if key not in self._known:
            self._known[key] = await self._read(partial(_newest, self._url, *key, self._within(name, namespace)))
        return self._known[key]

    async def _read(self, work: Callable[[], _Result]) -> _Result:
        try:
            return await at_storage(self._url, work)
        except TimeoutError as error:
            raise PerdureError(str(error)) from None

    def _within(self, name: str, namespace: str | None) -> str | None:
        """The folder below which others write; None where whoever asks may read what this process may."""
        return fill_template(self._url, name=name, namespace=namespace or self.namespace) if self._for_others else None


def summary_of(record: ArchivedJob) -> JobSummary:
    """The job as an entry of a list."""
    leading = next(iter(record.roles.values()), None)
    return JobSummary(
        name=record.name,
        namespace=record.namespace,
        workflow_id=record.workflow_id,
        run_id=record.run_id,
        phase=record.phase,
        backend=leading.status.backend if leading is not None else "",
        owner=record.owner,
        world_size=leading.status.world_size if leading is not None else None,
        restarts=leading.status.restarts_total if leading is not None else None,
        started_at=record.started_at,
        finished_at=record.finished_at,
    )


def _role_of(record: ArchivedJob, role: str | None) -> ArchivedRole:
    if not record.is_final:
        raise Refused(
            f"the archive has {record.name} only as it began, at {record.started_at:%Y-%m-%d %H:%M:%S} UTC",
            remedy="It is complete once the job has ended, or its worker was away since: perdure status without "
            "--archive asks the job itself.",
        )
    names = list(record.roles)
    if role is not None and role not in record.roles:
        raise Refused(f"{record.name} has no role {role}; its roles are: {', '.join(names)}")
    found = record.roles[role or names[0]]
    return found.replace(status=closed(found.status, summary_of(record)))


def _logs_of(record: ArchivedJob, folder: str) -> str:
    """Where the logs are: an archive that was moved has them still, while `outputs.logs` is a place of its own."""
    leading = next(iter(record.roles.values()), None)
    status = leading.status if leading is not None else None
    if status is None or status.logs_url in ("", archived_logs(status.archive)):
        return archived_logs(folder)
    return status.logs_url.rstrip("/")


def _newest(url: str, namespace: str, name: str, within: str | None) -> tuple[str, ArchivedJob]:
    place = f"{fill_template(url, name=name, namespace=namespace).rstrip('/')}/{namespace}/{name}"
    try:
        files, root = open_folder(place, within=within)
        runs = _names_in(files, root)
    except Exception as error:
        raise _unreadable(place, error) from error
    newest: tuple[str, ArchivedJob] | None = None
    for run in runs:
        # One after the other: only the newest takes memory.
        record = _record(files, f"{root}/{run}", f"{place}/{run}")
        if record is not None and (newest is None or record.started_at > newest[1].started_at):
            newest = run, record
    if newest is None:
        raise JobNotFound(
            f'{place} has no archive of a job "{name}"',
            remedy="Its place is what outputs.archive of its specification was; -n names another namespace.",
        )
    run, record = newest
    return f"{place}/{run}", record


def _all(url: str, namespace: str | None) -> tuple[list[JobSummary], list[str]]:
    """The jobs of all runs, of a namespace or of all, and what is wrong with the records that cannot be read."""
    place = fill_template(url, name="${job.name}", namespace=namespace or "${job.namespace}").rstrip("/")
    if "${job." in place:
        raise PerdureError(
            f"{place} is a place of its own for each job, and has no list of them",
            remedy="Name one job: perdure status NAME --archive URL.",
        )
    try:
        files, root = open_folder(place)
        is_there = files.exists(root)
        folders: list[str] = [f"{root}/{one}" for one in ([namespace] if namespace else _names_in(files, root))]
        with ThreadPoolExecutor(_AT_ONCE) as readers:
            for _ in ("names of jobs", "uids of runs"):
                below = readers.map(partial(_names_in, files), folders)
                folders = [f"{folder}/{one}" for folder, names in zip(folders, below, strict=True) for one in names]
            found = list(readers.map(partial(_summary, files), folders))
    except Exception as error:
        raise _unreadable(place, error) from error
    if not is_there:
        raise PerdureError(
            f"there is nothing at {place}", remedy="It is what outputs.archive of specifications of such jobs names."
        )
    return [one for one in found if isinstance(one, JobSummary)], [one for one in found if isinstance(one, str)]


def _summary(files: Any, folder: str) -> JobSummary | str | None:
    """The job of a run's folder, or what is wrong with its record; None if there is none."""
    try:
        record = _record(files, folder, folder)
    except PerdureError as error:
        return str(error)
    return None if record is None else summary_of(record)


def _unreadable(place: str, error: Exception) -> PerdureError:
    """What is said of any error of a storage: each one behind a URL raises errors of its own."""
    return PerdureError(
        f"{place} cannot be read: {str(error) or type(error).__name__}",
        remedy="This machine needs the storage's client and credentials.",
    )


def _record(files: Any, path: str, folder: str) -> ArchivedJob | None:
    """Reads the record of a run; None if there is none.

    Args:
        files: The file system.
        path: The run's folder in it.
        folder: The same, for messages.

    Raises:
        PerdureError: if it cannot be read, or is none.
    """
    try:
        with files.open(f"{path}/{ARCHIVED_JOB}", "rb") as file:
            content: bytes = file.read(_LARGEST + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:
        raise _unreadable(folder, error) from error
    if len(content) > _LARGEST:
        raise PerdureError(f"{folder}/{ARCHIVED_JOB} has more than {_LARGEST:,} bytes, which no worker has written")
    if content.count(b"{") + content.count(b"[") > _MOST_OBJECTS or content.count(b",") > _MOST_VALUES:
        raise PerdureError(
            f"{folder}/{ARCHIVED_JOB} has more than {_MOST_OBJECTS:,} objects or {_MOST_VALUES:,} values, which no "
            "worker has written"
        )
    try:
        record = ArchivedJob.model_validate_json(content)
    except ValidationError as error:
        raise PerdureError(f"{folder}/{ARCHIVED_JOB} is not the archive of a job") from error
    if problem := _problem_of(record, path):
        raise PerdureError(f"{folder}/{ARCHIVED_JOB} {problem}, which no worker has written")
    if record.format > FORMAT:
        raise PerdureError(f"{folder} was written by a newer release", remedy="Install that release to read it.")
    return record


def _problem_of(record: ArchivedJob, path: str) -> str:
    """What a record has that no worker writes into this folder; empty if nothing. Whoever may write to the archive of
    one job must not speak for others by it."""
    namespace, name = path.split("/")[-3:-1]
    if (record.namespace, record.name) != (namespace, name):
        return f"is about {record.namespace}/{record.name}"
    found = {
        "incidents": len(record.incidents),
        "nodes": sum(len(role.nodes) for role in record.roles.values()),
        "roles": len(record.roles),
        "datasets": len(record.datasets),
    }
    try:
        refuse_large(record.spec)
    except SpecError:
        return "has a specification that is far too large"
    return next((f"has {number:,} {what}" for what, number in found.items() if number > _MOST[what]), "")


def _kept_logs(place: str, within: str | None) -> Sequence[tuple[str, int, int]]:
    """Role, rank and incarnation of each log that is kept."""
    try:
        files, root = open_folder(place, within=within)
        found: list[tuple[str, int, int]] = []
        for folder in _names_in(files, root):
            node = _NODE.fullmatch(folder)
            if node is not None:
                numbers = [int(one) for one in _names_in(files, f"{root}/{folder}") if one.isdecimal()]
                found += [(node["role"], int(node["rank"]), number) for number in numbers]
        return sorted(found)
    except Exception as error:
        raise PerdureError(f"{place} cannot be read: {str(error) or type(error).__name__}") from error


def _names_in(files: Any, folder: str) -> list[str]:
    try:
        return [str(path).rstrip("/").rpartition("/")[2] for path in files.ls(folder, detail=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
