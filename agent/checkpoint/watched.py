"""Copies of what the script itself saves (`checkpoint.watch`), which the node's launcher hands over and gets back.

    <storage>/watched/ROLE-RANK/NUMBER-UID-INCARNATION/
        files/…            files as they are in the watched folder
        manifest.json      what belongs to the version, written last: without it there is no version
    <storage>/watched/marks/ROLE-RANK-UID
                           written by the node's first incarnation: one that does not find it is not at the same place

A version has the entries (files and folders) of the watched folder that were complete and new when the launcher looked.
Without a storage the same is in the memory of another node.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import threading
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Annotated, Any, Final, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter

from perdure.agent.checkpoint.saved_names import SavedName, parse
from perdure.agent.checkpoint.storage import LARGEST_RECORD
from perdure.contract.identity import NodeCredentials

logger = logging.getLogger(__name__)

Json = dict[str, Any]

_PLACE: Final = "watched"
_MARKS: Final = f"{_PLACE}/marks"
_MANIFEST: Final = "manifest.json"
_FILES: Final = "files"
_VERSION = re.compile(r"(\d{8,18})-([A-Za-z0-9]{1,64})-(\d{1,9})")
_LONGEST_PATH = 1024
_LARGEST: Final = 2**63 - 1
_AT_ONCE = 1 << 22
_SAME_SAVE = 60 * 10**9
"""Nanoseconds between the ends of two parts of one save, at most."""


class Pieces:
    """What is written to a file, whose size is known before."""

    def __init__(self, size: int, pieces: Iterable[bytes]) -> None:
        self.size = size
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._pieces)


class Files(Protocol):
    """A place for files: the job's storage, or another node. The methods are those of `Storage`."""

    def write(self, path: str, pieces: Pieces) -> tuple[int, int]: ...

    def read(self, path: str) -> bytes: ...

    def pieces(self, path: str, *, offset: int, length: int, piece: int) -> Iterator[bytes]: ...

    def size(self, path: str) -> int: ...

    def names(self, folder: str) -> set[str]: ...

    def remove(self, folder: str, *, first: str) -> None: ...


def check_path(text: str) -> str:
    """Returns the path of a file in the watched folder.

    Raises:
        ValueError: if it leads out of the folder.
    """
    if len(text) > _LONGEST_PATH or "\0" in text or any(part in ("", ".", "..") for part in text.split("/")):
        raise ValueError(f"path: expected names separated by '/', found {text[:120]!r}")
    return text


class WatchedFile(BaseModel):
    """One file of a version. The place that keeps it, such as another node, may say anything of it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    path: Annotated[str, AfterValidator(check_path)]
    """Relative to the watched folder, and within it."""
    size: int = Field(ge=0, le=_LARGEST)
    modified: int = Field(ge=0, le=_LARGEST)
    """The time of its last change, in nanoseconds since the epoch."""
    checksum: int = 0
    """CRC-32."""

    @property
    def entry(self) -> str:
        """The file or folder in the watched folder that it is or belongs to."""
        return self.path.split("/", 1)[0]


_MANIFEST_CONTENT = TypeAdapter(tuple[WatchedFile, ...])


@dataclass(frozen=True, order=True)
class Version:
    """The name of a version; a later one is greater."""

    number: int
    uid: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.number:08d}-{self.uid}-{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Reads a version's name.

        Raises:
            ValueError: if it is none.
        """
        match = _VERSION.fullmatch(text)
        if match is None:
            raise ValueError(f"version: expected NUMBER-UID-INCARNATION, found {text[:80]!r}")
        return cls(int(match[1]), match[2], int(match[3]))


class WatchedFiles:
    """The versions of one node, in the job's storage or on another node. Any thread may use it."""

    def __init__(
        self, storage: Files, node: NodeCredentials, *, keep_last: int, scarce: bool = False, url: str = ""
    ) -> None:
        """Creates the object.

        Args:
            storage: The job's storage, or what stands for it.
            node: The node. A later incarnation of it finds the versions of this one.
            keep_last: The number of saves that are kept.
            scarce: Whether the place is small, and of this run only: what was given up is deleted before the next try.
            url: The storage, of which a node that is replaced must find the one that its first incarnation used; empty
                where it takes any.
        """
        self._storage = storage
        self._scarce = scarce
        self._node = node
        self._place = f"{_PLACE}/{node.role}-{node.rank}"
        self._keep_last = keep_last
        self._url = url
        self._lock = threading.Lock()
        self._stored: dict[str, list[WatchedFile]] = {}
        """The files of versions that are not complete yet."""
        self._manifest: tuple[Version, dict[str, WatchedFile]] | None = None
        """The version that was read last, with its files by path. A complete one does not change."""

    def handle(self, request: Json, files: Sequence[int]) -> Json | tuple[int, Iterator[bytes]]:
        """Carries out a request of the launcher; returns an answer, or a size with the bytes.

        Raises:
            ValueError: if there is something wrong with it.
            FileNotFoundError: if there is no such file.
            OSError: if the storage is away; the libraries of storages raise others.
        """
        match request.get("do"):
            case "begin":
                return self._begin()
            case "put":
                return self._put(str(request["version"]), WatchedFile.model_validate(request), files)
            case "finish":
                return self._finish(str(request["version"]), int(request["files"]))
            case "choose":
                damaged = {(str(version), str(entry)) for version, entry in request.get("damaged", ())}
                versions = self._versions()
                self._check_storage(versions)
                chosen = choose(versions, damaged=damaged)
                content = json.dumps([one.dump() for one in chosen]).encode()
                return len(content), iter([content])
            case "read":
                return self._read(Version.parse(str(request["version"])), check_path(str(request["path"])))
            case other:
                raise ValueError(f"do: {str(other)[:40]!r} is unknown")

    def _check_storage(self, versions: Iterable[Version]) -> None:
        """Refuses, for now, a storage that is not the one which this node has used before: one that is not mounted
        looks empty, and its script would begin anew.

        Raises:
            OSError: if it is another one.
        """
        node, mark = self._node, f"{self._node.role}-{self._node.rank}-{self._node.uid}"
        if not self._url or mark in self._storage.names(_MARKS):
            return
        # An agent of an older release leaves no mark.
        if node.incarnation > 1 and all(one.uid != node.uid for one in versions):
            raise OSError(
                f"{self._url} has nothing of node {node.rank} of this job, whose first incarnation has left a mark "
                "there: it is not mounted on this node, or is another one"
            )
        self._storage.write(f"{_MARKS}/{mark}", Pieces(0, []))

    def forget(self) -> None:
        """Gives up versions that are not complete: the place that they are written to is another one now."""
        with self._lock:
            self._stored = {}

    def _begin(self) -> Json:
        known = self._all()
        if self._scarce:
            complete = self._versions()
            for version in known:
                if version not in complete:
                    self._storage.remove(f"{self._place}/{version}", first=_MANIFEST)
        newest = max((version.number for version in known), default=0)
        version = str(Version(newest + 1, self._node.uid, self._node.incarnation))
        with self._lock:
            # The launcher makes one version at a time; those that it gave up are never completed.
            self._stored = {version: []}
        return {"version": version}

    def _put(self, version: str, wanted: WatchedFile, files: Sequence[int]) -> Json:
        if len(files) != 1 or not stat.S_ISREG(os.fstat(files[0]).st_mode):
            raise ValueError("expected one regular file with the request")
        stored = self._files_of(version)
        _compare(files[0], wanted)
        size, checksum = self._storage.write(
            self._path(Version.parse(version), wanted.path), Pieces(wanted.size, _content(files[0], wanted.size))
        )
        _compare(files[0], wanted)
        stored.append(wanted.model_copy(update={"size": size, "checksum": checksum}))
        return {}

    def _finish(self, version: str, count: int) -> Json:
        stored = self._files_of(version)
        if len(stored) != count or not stored:
            raise ValueError(f"the version has {len(stored)} files, not {count}: begin again")
        manifest = _MANIFEST_CONTENT.dump_json(tuple(stored))
        self._storage.write(f"{self._place}/{version}/{_MANIFEST}", Pieces(len(manifest), [manifest]))
        with self._lock:
            self._stored.pop(version, None)
        self._delete_superfluous(Version.parse(version))
        return {}

    def _read(self, version: Version, path: str) -> tuple[int, Iterator[bytes]]:
        """Returns the size and the bytes of a file of a version that is complete, as `CheckedReads` does of a
        checkpoint's: the launcher compares those of larger files."""
        if self._manifest is None or self._manifest[0] != version:
            self._manifest = version, {file.path: file for file in self._files(version)}
        file = self._manifest[1].get(path)
        if file is None:
            raise FileNotFoundError(f"version {version} has no file {path[:120]!r}")
        place = self._path(version, path)
        if file.size > LARGEST_RECORD:
            if self._storage.size(place) != file.size:
                raise ValueError(f"{path} has not the size that was stored")
            return file.size, self._storage.pieces(place, offset=0, length=file.size, piece=_AT_ONCE)
        content = self._storage.read(place)
        if (len(content), zlib.crc32(content)) != (file.size, file.checksum):
            raise ValueError(f"{path} is not what was stored")
        return file.size, (content[at : at + _AT_ONCE] for at in range(0, file.size, _AT_ONCE))

    def _files_of(self, version: str) -> list[WatchedFile]:
        with self._lock:
            try:
                return self._stored[version]
            except KeyError:
                raise ValueError(f"version {version[:80]!r} was not begun with this agent: begin again") from None

    def _delete_superfluous(self, newest: Version) -> None:
        complete = self._versions()
        kept = kept_versions(complete, keep_last=self._keep_last)
        for version in self._all():
            if version not in kept and version < newest:
                self._storage.remove(f"{self._place}/{version}", first=_MANIFEST)

    def _all(self) -> list[Version]:
        """All versions, also those that are not complete."""
        return sorted(Version.parse(name) for name in self._storage.names(self._place) if _VERSION.fullmatch(name))

    def _versions(self) -> dict[Version, tuple[WatchedFile, ...]]:
        """The complete versions with their files."""
        found: dict[Version, tuple[WatchedFile, ...]] = {}
        for version in current(self._all()):
            try:
                found[version] = self._files(version)
            except (FileNotFoundError, ValueError):
                continue
        return found

    def _files(self, version: Version) -> tuple[WatchedFile, ...]:
        """The files of a complete version.

        Raises:
            FileNotFoundError: if it is not complete.
            ValueError: if its list is damaged.
        """
        return _MANIFEST_CONTENT.validate_json(self._storage.read(f"{self._place}/{version}/{_MANIFEST}"))

    def _path(self, version: Version, path: str) -> str:
        return f"{self._place}/{version}/{_FILES}/{path}"


@dataclass(frozen=True)
class ChosenEntry:
    """An entry of a version."""

    version: Version
    entry: str
    files: tuple[WatchedFile, ...]

    @cached_property
    def name(self) -> SavedName:
        """The entry's name by what its numbers count."""
        return parse(self.entry)

    @property
    def modified(self) -> int:
        """The time of the last change of its files, in nanoseconds since the epoch."""
        return max(file.modified for file in self.files)

    @property
    def is_file(self) -> bool:
        return self.files[0].path == self.entry

    @property
    def age(self) -> tuple[Version, int]:
        """A later one is greater."""
        return self.version, self.modified

    def dump(self) -> Json:
        """The fields for the launcher."""
        return {
            "version": str(self.version),
            "entry": self.entry,
            "files": [file.model_dump() for file in self.files],
        }


def current(versions: Sequence[Version]) -> list[Version]:
    """Leaves out versions that an incarnation wrote when a later one had written already: it had been replaced."""
    found: list[Version] = []
    latest: dict[str, int] = {}
    for version in sorted(versions):
        if version.incarnation >= latest.setdefault(version.uid, version.incarnation):
            latest[version.uid] = version.incarnation
            found.append(version)
    return found


def choose(
    versions: Mapping[Version, Sequence[WatchedFile]], *, damaged: Collection[tuple[str, str]] = ()
) -> list[ChosenEntry]:
    """Chooses what a node gets back: the newest entry of each kind, of what ranks have saved together the newest save
    that has all its parts.

    In place of a damaged or incomplete one an older one is taken, and nothing that is as new: a file that names the
    newest save must not lead to one that is missing.

    Args:
        versions: The complete versions with their files.
        damaged: Version and entry of those that cannot be read as they were stored.
    """
    entries = _entries(versions)
    bad = [one for one in entries if (str(one.version), one.entry) in damaged]
    intact = [one for one in entries if one not in bad]
    for one in bad:
        others = [other.age for other in intact if other.name.kind == one.name.kind]
        if others and max(others) < one.age:
            intact = [other for other in intact if other.age < one.age and not _saved_with(other, one)]
        elif not others and one.name.ranks:
            intact = [other for other in intact if other.name.save != one.name.save]
            logger.warning("%s is not restored, since the copy of %s is damaged", one.name.save, one.entry)
    for save in _incomplete(intact):
        parts = [one for one in intact if one.name.save == save]
        if not parts:
            continue
        logger.warning("%s is not restored, of which parts are missing: %s", save, ", ".join(_names(parts)))
        begun = min(one.age for one in parts)
        intact = [one for one in intact if one.age < begun]
    chosen: dict[str, ChosenEntry] = {}
    for one in intact:
        first = chosen.setdefault(one.name.kind, one)
        if one is not first and one.entry not in chosen and _are_parts(first, one):
            chosen[one.entry] = one
    return list(chosen.values())


def kept_versions(versions: Mapping[Version, Sequence[WatchedFile]], *, keep_last: int) -> set[Version]:
    """The versions that have one of the newest entries of a kind, or a part of one of the newest complete saves."""
    kept: set[Version] = set()
    seen: dict[str, list[ChosenEntry]] = {}
    entries = _entries(versions)
    for one in entries:
        saves = seen.setdefault(one.name.kind, [])
        if not (saves and _are_parts(saves[-1], one)):
            saves.append(one)
        if len(saves) <= keep_last:
            kept.add(one.version)
    for sets in _saves(entries).values():
        complete = [name for name in sets if name not in _incomplete_of(sets)][:keep_last]
        kept |= {part.version for name in complete for part in sets[name].values()}
    return kept


def _entries(versions: Mapping[Version, Sequence[WatchedFile]]) -> list[ChosenEntry]:
    """All entries, the latest first."""
    grouped: dict[tuple[Version, str], list[WatchedFile]] = {}
    for version, files in versions.items():
        for file in files:
            grouped.setdefault((version, file.entry), []).append(file)
    found = (ChosenEntry(version, entry, tuple(files)) for (version, entry), files in grouped.items())
    return sorted(found, key=lambda one: one.age, reverse=True)


def _are_parts(newer: ChosenEntry, older: ChosenEntry) -> bool:
    """Whether two files whose names differ in a number may be parts of one save, though no word says so."""
    together = newer.version == older.version and newer.modified - older.modified <= _SAME_SAVE
    alike = newer.is_file and older.is_file and newer.entry != older.entry
    return together and alike and not newer.name.counts_saves


def _saved_with(one: ChosenEntry, damaged: ChosenEntry) -> bool:
    """Whether an entry belongs to the save of a damaged one, or to a later one of the same ranks."""
    return bool(one.name.ranks) and one.name.family == damaged.name.family and one.version >= damaged.version


def _saves(entries: Iterable[ChosenEntry]) -> dict[str, dict[str, dict[str, ChosenEntry]]]:
    """What ranks have saved together, the latest first: the newest entry of each rank, by save and family."""
    found: dict[str, dict[str, dict[str, ChosenEntry]]] = {}
    for one in entries:
        if one.name.ranks:
            found.setdefault(one.name.family, {}).setdefault(one.name.save, {}).setdefault(one.name.ranks, one)
    return found


def _incomplete(entries: Iterable[ChosenEntry]) -> list[str]:
    """The newest saves that have fewer parts than those before them, the latest first."""
    found: list[str] = []
    for sets in _saves(entries).values():
        incomplete = _incomplete_of(sets)
        found += takewhile(lambda save, incomplete=incomplete: save in incomplete, sets)
    return found


def _incomplete_of(sets: Mapping[str, Mapping[str, ChosenEntry]]) -> set[str]:
    return {newer for newer, older in pairwise(sets) if len(sets[newer]) < len(sets[older])}


def _names(entries: Iterable[ChosenEntry]) -> list[str]:
    return sorted({one.entry for one in entries})


def _compare(file: int, wanted: WatchedFile) -> None:
    """Raises `ValueError` if a file is not the one that the launcher found complete."""
    found = os.fstat(file)
    if (found.st_size, min(max(found.st_mtime_ns, 0), _LARGEST)) != (wanted.size, wanted.modified):
        raise ValueError(f"{wanted.path} changes while it is copied")


def _content(file: int, size: int) -> Iterator[bytes]:
    offset = 0
    while offset < size:
        piece = os.pread(file, min(_AT_ONCE, size - offset), offset)
        if not piece:
            return
        offset += len(piece)
        yield piece
