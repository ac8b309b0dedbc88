"""The folder of a local node: its whole state, which any worker of this machine can take over from another one.

    <state>/nodes/<node name>/
        node.json           the node's identity
        launcher.pid        the running processes, written by the processes themselves
        agent.pid
        deleted             the node was deleted: nothing is started here any more
        ended.json          the node has ended: how, and when
        agent.json          configurations, with the incarnation's token
        launcher.json
        run/                the run directory of docs/node-protocol.md
    <state>/deleting/       folders of old jobs that are being deleted
    <state>/checks/<host>/  what checks of the machine have measured

The presence of a file is the state. Files are written atomically and in a fixed order, so a worker that dies at any
point leaves a folder that the next worker can interpret.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import socket
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from perdure.activities.nodes.local.processes import ProcessIdentity, processes_of
from perdure.base.files import read_record, write_private_file
from perdure.contract import NodeId, NodeRequest
from perdure.spec.durations import parse_duration
from perdure_training.node_api import layout
from perdure_training.node_api.untrusted_files import make_own_folder

DEFAULT_RETENTION = timedelta(days=7)
"""Default retention: how long the folders of a job outlive it if the state folder does not configure that."""

_RUN = "run"
"""The run directory in a node's folder."""


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class FolderOwner(NodeId):
    """Which node a folder is of."""

    job_id: str
    group_id: str
    created_at: datetime

    @classmethod
    def of(cls, request: NodeRequest) -> FolderOwner:
        """Creates the owner of the folder of a node that is created now."""
        node = NodeId.model_validate(request.node, from_attributes=True)
        return cls(**dict(node), job_id=request.job_id, group_id=request.group_id, created_at=now())

    @property
    def mark(self) -> str:
        """The value of `PERDURE_NODE` in the environment of all processes of the node."""
        return self.path


class Ending(_File):
    """The end of a node; also the format of the launcher's `exit.json`."""

    time: datetime
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None


class NodeFolder:
    """One node's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    @property
    def exists(self) -> bool:
        return self.path.is_dir()

    @property
    def record(self) -> FolderOwner | None:
        return read_record(self.path / "node.json", FolderOwner)

    @property
    def launcher(self) -> ProcessIdentity | None:
        return ProcessIdentity.read(self.launcher_file)

    @property
    def agent(self) -> ProcessIdentity | None:
        return ProcessIdentity.read(self.agent_file)

    @property
    def launcher_file(self) -> Path:
        return self.path / "launcher.pid"

    @property
    def agent_file(self) -> Path:
        return self.path / "agent.pid"

    @property
    def ended(self) -> Ending | None:
        return read_record(self.path / "ended.json", Ending)

    @property
    def launcher_exit(self) -> Ending | None:
        """The end that the launcher recorded; None if the launcher was killed."""
        return read_record(self.path / _RUN / layout.EXIT, Ending)

    @property
    def deleted(self) -> bool:
        return (self.path / "deleted").exists()

    @property
    def at_rest_since(self) -> datetime | None:
        """The time at which the node's last process ended, as far as its files show; None while one of them runs."""
        if any(process is not None and process.alive for process in (self.launcher, self.agent)):
            return None
        ending = self.ended
        return ending.time.astimezone(UTC) if ending else datetime.fromtimestamp(self.path.stat().st_mtime, UTC)

    @property
    def log(self) -> Path:
        return layout.output_log(self.path / _RUN)

    @property
    def run_dir(self) -> Path:
        """The run directory, by a path that is short enough for sockets: a symbolic link if the real path is too
        long."""
        real = self.path / _RUN
        if len(os.fsencode(real / layout.AGENT_SOCKET)) <= layout.LONGEST_SOCKET_PATH:
            return real
        link = self._short_link
        make_own_folder(link.parent, remedy="set TMPDIR to a folder of your own")
        with contextlib.suppress(FileExistsError):
            link.symlink_to(real)
        return link

    @property
    def checks_of_machine(self) -> Path:
        """The folder for what checks of this machine have measured; machines may share the state folder."""
        return self.path.parent.parent / "checks" / socket.gethostname()

    @property
    def _short_link(self) -> Path:
        digest = hashlib.sha256(os.fsencode(self.path / _RUN)).hexdigest()[:16]
        return layout.short_links() / digest

    def make(self) -> None:
        """Creates the folder, accessible to its owner only."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)

    @contextlib.contextmanager
    def lock(self) -> Generator[None]:
        """Holds the folder's lock, which one worker at a time can hold; blocks. The kernel releases it if its holder
        dies."""
        with lock(self.path / "lock"):
            yield

    def write(self, name: str, content: str) -> Path:
        """Writes a file atomically, readable by its owner only."""
        path = self.path / name
        write_private_file(path, content.encode())
        return path

    def mark_deleted(self) -> None:
        """Prevents any process from starting anything here from now on."""
        self.make()
        (self.path / "deleted").touch()

    def move_to(self, folder: Path) -> None:
        """Moves the whole node folder in one step, so that no process finds a partly deleted folder under its name."""
        self._short_link.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(folder / self.name)

    def mark_ended(self, ending: Ending) -> Ending:
        """Records how the node ended. The first record stays."""
        if (noted := self.ended) is not None:
            return noted
        self.write("ended.json", ending.model_dump_json())
        return ending


class NodeFolders:
    """All nodes of this machine's user."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._nodes = state / "nodes"

    def folder(self, name: str) -> NodeFolder:
        """Returns the folder of a node, which need not exist."""
        if not re.fullmatch(r"[a-z0-9][-a-z0-9]*", name):
            raise ValueError(f"{name!r} is not the name of a node; expected lowercase letters, digits and hyphens")
        return NodeFolder(self._nodes / name)

    def of_job(self, uid: str, role: str) -> list[NodeFolder]:
        """Returns the nodes of a job's run, including ended ones. They are found by name, so that old jobs cost
        nothing."""
        pattern = re.compile(rf".*-{re.escape(role)}-\d+-{re.escape(uid)}\d+")
        found = [NodeFolder(self._nodes / name) for name in self._names() if pattern.fullmatch(name)]
        # The name of a role may end that of another one, as `worker` ends `eval-worker`.
        return [folder for folder in found if (record := folder.record) is None or record.role == role]

    def by_job(self) -> Mapping[str, list[NodeFolder]]:
        """Returns all nodes, by the uid of their job's run."""
        jobs: defaultdict[str, list[NodeFolder]] = defaultdict(list)
        for name in self._names():
            if match := re.fullmatch(r".*-\d+-([0-9a-f]{8})\d+", name):
                jobs[match[1]].append(NodeFolder(self._nodes / name))
        return jobs

    def running_nodes(self) -> list[NodeFolder]:
        """Returns the nodes that run on this machine, of all jobs."""
        folders = (NodeFolder(self._nodes / name) for name in self._names())
        live = (folder for folder in folders if not (folder.path / "ended.json").exists())
        return [folder for folder in live if (launcher := folder.launcher) is not None and launcher.alive]

    def unended(self) -> Generator[tuple[NodeFolder, FolderOwner]]:
        """Yields the nodes of this machine that have not ended, of all jobs: those that run, and those that wait."""
        for name in self._names():
            folder = NodeFolder(self._nodes / name)
            if (folder.path / "ended.json").exists() or folder.deleted:
                continue
            if (record := folder.record) is not None:
                yield folder, record

    def remove(self, nodes: Iterable[NodeFolder]) -> None:
        """Deletes nodes with everything in their folders, and what an earlier call left unfinished."""
        leaving = self._state / "deleting"
        leaving.mkdir(mode=0o700, exist_ok=True)
        for node in nodes:
            node.move_to(leaving)
        shutil.rmtree(leaving, ignore_errors=True)

    def remove_unwatched(self) -> None:
        """Deletes the nodes that no worker of this machine has started, and that ended longer ago than the retention:
        no worker deletes them with their jobs.

        Raises:
            ValueError: if the state folder's retention is not a duration.
        """
        oldest_kept = now() - self.retention
        folders = [NodeFolder(self._nodes / name) for name in self._names()]
        unwatched = [one for one in folders if not one.launcher_file.exists()]
        old = [one for one in unwatched if (since := one.at_rest_since) is not None and since < oldest_kept]
        self.remove(one for one in old if one.ended is not None or not has_processes(one.record))

    @property
    def capacity(self) -> int | None:
        """The maximum number of running nodes, from the file `capacity`; None if that sets no limit."""
        try:
            return int((self._state / "capacity").read_text())
        except (FileNotFoundError, ValueError):
            return None

    @property
    def retention(self) -> timedelta:
        """The time for which a job's folders outlive it, from the file `retention`.

        Raises:
            ValueError: if the file does not contain a duration.
        """
        try:
            return parse_duration((self._state / "retention").read_text().strip())
        except FileNotFoundError:
            return DEFAULT_RETENTION

    @contextlib.contextmanager
    def admission(self) -> Generator[None]:
        """Holds the lock under which one process at a time counts nodes and starts one; blocks."""
        with lock(self._state / "admission.lock"):
            yield

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self._nodes))
        except FileNotFoundError:
            return []


def has_processes(owner: FolderOwner | None) -> bool:
    """Returns whether a process of a node runs."""
    return owner is not None and next(processes_of(owner.mark), None) is not None


@contextlib.contextmanager
def lock(path: Path) -> Generator[None]:
    """Holds an exclusive lock on a file that is never deleted."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def now() -> datetime:
    return datetime.now(UTC)
