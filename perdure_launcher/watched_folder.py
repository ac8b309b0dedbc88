"""Has the agent copy to the job's storage, or to another node's memory, what the script itself saves into a folder of
the node (`checkpoint.watch`), and brings it back on a node that lacks it.

The launcher does that because it sees the user's files, in a pod as well; the agent has the storage's credentials and
libraries, and knows the other nodes. A process that is killed while it saves leaves a file that never changes again, so
that a file counts as complete only if its format, too, shows that it is.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import struct
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from perdure_training.background import lower_thread_priority
from perdure_training.node_api.bodies import RestoringReport
from perdure_training.node_api.storage_link import StorageAway, StorageLink, StorageProblem

logger = logging.getLogger(__name__)

LOOK = 1.0
"""Seconds between two looks at the folder. What does not change between two of them may be complete."""
_AGAIN = 5.0
"""Seconds until a copy to or from the storage is tried again."""
_LAST_LOOKS = 3
"""Looks after the command's end: what is new is copied at the second one, and one copy may fail and be tried again."""
_LAST_PAUSE = 0.5
"""Seconds before that."""
_RESTORE_AGAIN = 1.0
"""The same for the copies that the command waits for."""
WAITS = 5.0
"""Seconds of waiting for the folder after which the job learns of it."""
_LACKING = 300.0
"""Seconds without a change after which a folder is copied that lacks files of the one before it: a script may save less
than before. It is longer than ranks take to gather the state of an optimizer."""
_REWORD = 60.0
"""Seconds after which the job learns of another reason for the same wait: each report is an event of its history."""
_DRAFT_BEGINS = (".", "tmp-", "tmp_", "tmp.")
_DRAFT_ENDS = (".tmp", ".temp", ".part", ".partial", ".incomplete")
"""How names of what is still being written begin or end."""
_LONGEST_PATH = 1024
"""Characters of a path that the agent takes."""
_LATEST = 2**63 - 1
"""Nanoseconds since the epoch."""
_PIECE = 1 << 22
_RESTORED = ".perdure-restored"
_DCP_DATA, _DCP_INDEX = ".distcp", ".metadata"
_OF_TRAINER, _TRAINER_ENDS = re.compile(r"((?:.*/)?checkpoint-\d+)/training_args\.bin"), "trainer_state.json"
"""Files of the Trainer of Hugging Face: it writes the second one last, after the optimizer."""
_ZIP = b"PK\x03\x04"


@dataclass(frozen=True, order=True)
class SavedFile:
    """A file as it is in the folder."""

    path: str
    """Relative to the folder."""
    size: int
    modified: int
    """The time of its last change, in nanoseconds since the epoch."""


Entries = dict[str, tuple[SavedFile, ...]]
"""The files and folders in the watched folder, with the files that each has or is."""


class WatchedFolder:
    """The folder of one node. Its work is done by one thread.

    Invariants:
        - Nothing that is torn is copied, as far as that can be seen, and nothing is restored that differs from what was
          copied.
        - No failure ends the command; it starts once the folder is restored.
    """

    def __init__(
        self,
        folder: Path,
        link: StorageLink,
        *,
        on_restored: Callable[[], None],
        report: Callable[[RestoringReport], None] = lambda _: None,
    ) -> None:
        """Creates the object.

        Args:
            folder: The folder, which need not exist.
            link: The node's agent.
            on_restored: Called by the thread when the command may start.
            report: Tells the job that the command waits, and when it does not wait any longer. Any thread calls it.
        """
        self._folder = folder
        self._link = link
        self._on_restored = on_restored
        self._wait = _Wait(report)
        self._seen: Entries = {}
        self._copied: Entries = {}
        self._parts: dict[str, frozenset[str]] = {}
        """The names without numbers of the files that the newest copied entry of each kind has."""
        self._unchanged_since: dict[str, float] = {}
        self._place: Any = None
        """Distinguishes the nodes that keep the copies; None for the job's storage, and until one is known."""
        self._again_at = 0.0
        self._ending = threading.Event()
        self._problem = ""
        self._left_out: Collection[str] = ()
        self._thread = threading.Thread(target=self._run, name="watched-folder", daemon=True)
        self.restored = False

    def start(self) -> None:
        """Begins to restore, and then to watch."""
        self._thread.start()

    def close(self, *, within: float) -> None:
        """Copies what is complete by now; call it when no process writes to the folder any more."""
        self._ending.set()
        if self.restored:
            self._thread.join(within)

    def _run(self) -> None:
        with self._wait:
            while not self._restore() and not self._ending.wait(_RESTORE_AGAIN):
                self._wait.explain(self._problem)
        self._problem = ""
        self.restored = True
        self._on_restored()
        lower_thread_priority()
        while not self._ending.wait(LOOK):
            self.look()
        # No process is left that could change anything between these.
        for _ in range(_LAST_LOOKS):
            if not self.look():
                return
            if time.monotonic() < self._again_at:
                time.sleep(_LAST_PAUSE)

    # Copying

    def look(self) -> bool:
        """Copies what is new and has not changed since the last look; returns whether something is left."""
        if (place := self._link.desired().get("place")) != self._place:
            # Another node keeps the copies now, and has none.
            self._place, self._copied, self._again_at = place, {}, 0.0
        left_out: dict[str, str] = {}
        now = read_entries(self._folder, left_out)
        for name in left_out.keys() - self._left_out:
            logger.warning("%s: %s", self._folder, f"{name[:120]!r} is not copied: {left_out[name]}")
        self._left_out = left_out
        before, self._seen = self._seen, now
        changed = {name: time.monotonic() for name, files in now.items() if before.get(name) != files}
        self._unchanged_since = {name: since for name, since in self._unchanged_since.items() if name in now} | changed
        new = {name: files for name, files in now.items() if self._copied.get(name) != files}
        complete = {
            name: files
            for name, files in new.items()
            if name not in changed and is_whole(self._folder, files) and self._has_all_parts(name, files)
        }
        # A script may delete a save before a try that comes later, so that it looks as often as always.
        if complete and (self._ending.is_set() or time.monotonic() >= self._again_at):
            try:
                self._copy(complete)
            except (StorageAway, StorageProblem, OSError) as error:
                self._again_at = time.monotonic() + _AGAIN
                self._warn(f"what the script has saved is not copied, and is tried again: {error}")
                return True
            self._problem = ""
        return len(complete) < len(new)

    def _has_all_parts(self, name: str, files: Iterable[SavedFile]) -> bool:
        """Whether a folder has what the one before it had: ranks may gather the state of an optimizer for minutes after
        they have saved the model."""
        lacking = self._parts.get(_unnumbered(name), frozenset()) - _parts_of(files)
        return not lacking or time.monotonic() - self._unchanged_since[name] >= _LACKING

    def _note_copied(self, entries: Entries) -> None:
        self._copied |= entries
        for name, files in sorted(entries.items(), key=lambda entry: _last_change(entry[1])):
            self._parts[_unnumbered(name)] = _parts_of(files)

    def _copy(self, entries: Entries) -> None:
        begun = time.monotonic()
        version = self._link.ask({"request": "watched", "do": "begin"}, within=None)["version"]
        files = [file for found in entries.values() for file in found]
        for file in files:
            descriptor = os.open(self._folder / file.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fields = {"path": file.path, "size": file.size, "modified": file.modified}
                request = {"request": "watched", "do": "put", "version": version, **fields}
                self._link.ask(request, files=[descriptor], within=None)
            finally:
                os.close(descriptor)
        self._link.ask({"request": "watched", "do": "finish", "version": version, "files": len(files)}, within=None)
        self._note_copied(entries)
        size = sum(file.size for file in files)
        taken = time.monotonic() - begun
        logger.info("copied %s, %s bytes, in %.1f s", ", ".join(sorted(entries)), f"{size:,}", taken)

    # Restoring

    def _restore(self) -> bool:
        """Brings back what the folder lacks; returns whether that is done."""
        staging = self._folder / _RESTORED
        self._place = self._link.desired().get("place")
        try:
            damaged: list[tuple[str, str]] = []
            while True:
                request = {"request": "watched", "do": "choose", "damaged": damaged}
                chosen = json.loads(self._link.read(request, patience=0.0))
                shutil.rmtree(staging, ignore_errors=True)
                bad = next((one for one in self._missing(chosen) if not self._fetch(one, staging)), None)
                if bad is None:
                    break
                damaged.append((bad["version"], bad["entry"]))
                logger.warning("the copy of %s is damaged, and is not restored", bad["entry"])
            self._put_in_place(staging)
        except StorageProblem as error:
            # An agent of an older release does not know these requests.
            self._warn(f"nothing is restored: {error}")
        except (StorageAway, OSError, ValueError) as error:
            self._warn(str(error) or type(error).__name__, "the command waits, since it cannot be restored")
            return False
        return True

    def _missing(self, chosen: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """The entries that are not here, or older."""
        here = read_entries(self._folder)
        for one in chosen:
            files = tuple(sorted(SavedFile(file["path"], file["size"], file["modified"]) for file in one["files"]))
            own = here.get(one["entry"], ())
            if own == files:
                self._note_copied({one["entry"]: own})
            elif not own or _last_change(own) < _last_change(files):
                yield one

    def _fetch(self, entry: Mapping[str, Any], staging: Path) -> bool:
        """Reads an entry; returns whether it is as it was stored."""
        for file in entry["files"]:
            target = staging / file["path"]
            target.parent.mkdir(parents=True, exist_ok=True)
            request = {"request": "watched", "do": "read", "version": entry["version"], "path": file["path"]}
            size = checksum = 0
            try:
                with target.open("w+b") as output:
                    self._link.stream(request, output.write)
                    output.seek(0)
                    while piece := output.read(_PIECE):
                        size += len(piece)
                        checksum = zlib.crc32(piece, checksum)
            except StorageProblem:
                return False
            if (size, checksum) != (file["size"], file["checksum"]):
                return False
            os.utime(target, ns=(file["modified"], file["modified"]))
        return True

    def _put_in_place(self, staging: Path) -> None:
        names = sorted(path.name for path in staging.iterdir()) if staging.exists() else []
        for name in names:
            target = self._folder / name
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            (staging / name).replace(target)
        shutil.rmtree(staging, ignore_errors=True)
        here = read_entries(self._folder)
        self._note_copied({name: here[name] for name in names if name in here})
        if names:
            logger.info("restored %s in %s", ", ".join(names), self._folder)

    def _warn(self, problem: str, effect: str = "") -> None:
        if problem != self._problem:
            self._problem = problem
            logger.warning("%s: %s", self._folder, f"{effect}: {problem}" if effect else problem)


class _Wait:
    """Tells the job of a wait that takes long."""

    def __init__(self, report: Callable[[RestoringReport], None]) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._timer = threading.Timer(WAITS, self._begin)
        self._timer.daemon = True
        self._problem = ""
        self._reported: tuple[float, str] | None = None

    def __enter__(self) -> None:
        self._since = time.time()
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            if self._reported is not None:
                self._report(RestoringReport())
            self._reported = 0.0, ""

    def explain(self, problem: str) -> None:
        """Sets the reason."""
        with self._lock:
            self._problem = problem
            if self._reported is None or self._reported[1] == problem:
                return
            if not self._reported[1] or time.monotonic() - self._reported[0] >= _REWORD:
                self._tell()

    def _begin(self) -> None:
        with self._lock:
            # It may have ended while this thread began.
            if self._reported is None:
                self._tell()

    def _tell(self) -> None:
        self._reported = time.monotonic(), self._problem
        self._report(RestoringReport(since=self._since, problem=self._problem))


def folder_of(text: str, environment: Mapping[str, str]) -> Path:
    """Returns the watched folder, with variables of the command's environment and `~` filled in."""
    return Path(Template(text).safe_substitute(environment)).expanduser()


def read_entries(folder: Path, left_out: dict[str, str] | None = None) -> Entries:
    """Returns what is in the folder, without drafts.

    Args:
        folder: The folder.
        left_out: Takes the names of entries that have a path which cannot be copied, and why not.
    """
    found: Entries = {}
    left_out = {} if left_out is None else left_out
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return found
    for name in names:
        if name.startswith(_DRAFT_BEGINS) or name.endswith(_DRAFT_ENDS):
            continue
        try:
            files = tuple(sorted(_files_in(folder, name)))
        except OSError:
            # It is being deleted or renamed.
            continue
        if problem := next(filter(None, (_problem_of(file.path) for file in files)), ""):
            left_out[name] = problem
        elif files:
            found[name] = files
    return found


def _problem_of(path: str) -> str:
    """Why a path cannot be copied; empty if it can."""
    if len(path) > _LONGEST_PATH:
        return f"it has a path of more than {_LONGEST_PATH:,} characters"
    try:
        path.encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8" if "/" not in path else f"the name of its file {path[-120:]!r} is not UTF-8"
    return ""


def _files_in(folder: Path, name: str) -> Iterator[SavedFile]:
    path = folder / name
    if len(name) > _LONGEST_PATH:
        # It is not read any deeper.
        yield SavedFile(name, 0, 0)
    elif path.is_dir() and not path.is_symlink():
        for inner in os.listdir(path):
            yield from _files_in(folder, f"{name}/{inner}")
    elif path.is_file():
        known = path.stat()
        # The agent knows no time before 1970 or after 2262, as some archives have.
        yield SavedFile(name, known.st_size, min(max(known.st_mtime_ns, 0), _LATEST))


def is_whole(folder: Path, files: Iterable[SavedFile]) -> bool:
    """Whether the files have ends, as far as their formats say, and a folder of `torch.distributed.checkpoint` or of
    Hugging Face's Trainer has what is written last."""
    paths = {file.path for file in files}
    for path in paths:
        place = path.rpartition("/")[0]
        if path.endswith(_DCP_DATA) and f"{place}/{_DCP_INDEX}".lstrip("/") not in paths:
            return False
        if (trainer := _OF_TRAINER.fullmatch(path)) and f"{trainer[1]}/{_TRAINER_ENDS}" not in paths:
            return False
    return all(_has_end(folder / path) for path in paths)


def _has_end(path: Path) -> bool:
    """Whether a file of torch.save or of safetensors is not torn; True for other formats."""
    try:
        with path.open("rb") as file:
            begin = file.read(8)
            if begin[:4] == _ZIP:
                # The list of the parts is written last, at the end.
                return zipfile.is_zipfile(file)
            if path.suffix == ".safetensors":
                length = struct.unpack("<Q", begin)[0]
                header = json.loads(file.read(length))
                end = max((one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"), default=0)
                return path.stat().st_size == 8 + length + end
            # A process that is killed before its first byte leaves an empty file; a mark without content has no suffix.
            return bool(begin) or not path.suffix
    except (OSError, ValueError, struct.error, LookupError, TypeError, MemoryError):
        return False


def _parts_of(files: Iterable[SavedFile]) -> frozenset[str]:
    return frozenset(_unnumbered(file.path) for file in files)


def _unnumbered(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _last_change(files: Iterable[SavedFile]) -> int:
    return max(file.modified for file in files)
