"""Reads the memory cgroup: the limit, free memory, and out-of-memory kills."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""Values from here on mean no limit: cgroup v1 writes "unlimited" as a number near 2^63."""


class MemoryController:
    """The memory cgroup of this process; version 1 or 2, or none at all."""

    def __init__(self, root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> None:
        self._directory, self._version = _find(root, membership)
        self._root = root

    @property
    def limit_bytes(self) -> int | None:
        """The smallest limit of our cgroup and its parents; None if there is none."""
        return min((limit for _, limit in self._limits()), default=None)

    @property
    def free_bytes(self) -> int | None:
        """The memory that may still be used below the nearest limit, including file caches; None if there is no
        limit."""
        used = ((limit, self._working_set(directory)) for directory, limit in self._limits())
        return min((limit - bytes for limit, bytes in used if bytes is not None), default=None)

    @property
    def working_set_bytes(self) -> int | None:
        """The memory that counts against the nearest limit, without file caches that can be reclaimed; None if there is
        no limit, since other processes of the machine may be counted then."""
        directory = next((directory for directory, _ in self._limits()), None)
        return None if directory is None else self._working_set(directory)

    def _working_set(self, directory: Path) -> int | None:
        usage, cached = ("memory.current", "inactive_file")
        if self._version == 1:
            usage, cached = ("memory.usage_in_bytes", "total_inactive_file")
        used = _read(directory / usage).strip()
        if not used.isdecimal():
            return None
        return max(0, int(used) - _entry(directory / "memory.stat", cached))

    @property
    def out_of_memory_kills(self) -> int:
        """The number of processes in our cgroup that the kernel's OOM killer has killed; only its growth is
        meaningful."""
        if self._directory is None:
            return 0
        name = "memory.events" if self._version == 2 else "memory.oom_control"
        return _entry(self._directory / name, "oom_kill")

    def _limits(self) -> Iterator[tuple[Path, int]]:
        """Yields our cgroup and its parents that have a limit, each with its limit."""
        directory = self._directory
        name = "memory.max" if self._version == 2 else "memory.limit_in_bytes"
        while directory is not None and directory.is_relative_to(self._root):
            text = _read(directory / name).strip()
            if text.isdecimal() and int(text) < _NO_LIMIT:
                yield directory, int(text)
            directory = directory.parent


def _find(root: Path, membership: Path) -> tuple[Path | None, int]:
    for line in _read(membership).splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _existing_folder(root / "memory", path), 1
        if number == "0" and not controllers and (root / "cgroup.controllers").exists():
            return _existing_folder(root, path), 2
    return None, 2


def _existing_folder(mount: Path, path: str) -> Path | None:
    """Returns the cgroup's folder. Inside a container the path in /proc may be the host's; then the mount itself is
    ours."""
    for directory in (mount / path.lstrip("/"), mount):
        if directory.is_dir():
            return directory
    return None


def _entry(path: Path, name: str) -> int:
    """Returns a value from a file of names and numbers; 0 if it is missing."""
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
