"""What the memory controller says: how much may be used, and whether somebody was killed for using more."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""cgroup v1 writes "unlimited" as a number near 2^63."""


class MemoryController:
    """The memory cgroup of this process; version 1 or 2, or none at all."""

    def __init__(self, root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> None:
        self._directory, self._version = _find(root, membership)
        self._root = root

    @property
    def limit_bytes(self) -> int | None:
        """The smallest limit from our cgroup upwards; None where there is none."""
        limits: list[int] = []
        directory = self._directory
        name = "memory.max" if self._version == 2 else "memory.limit_in_bytes"
        while directory is not None and directory.is_relative_to(self._root):
            text = _read(directory / name).strip()
            if text.isdecimal() and int(text) < _NO_LIMIT:
                limits.append(int(text))
            directory = directory.parent
        return min(limits, default=None)

    @property
    def out_of_memory_kills(self) -> int:
        """How many processes of our cgroup the kernel has killed for want of memory; only its growth means anything."""
        if self._directory is None:
            return 0
        name = "memory.events" if self._version == 2 else "memory.oom_control"
        for line in _read(self._directory / name).splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.strip().isdecimal():
                return int(value)
        return 0


def _find(root: Path, membership: Path) -> tuple[Path | None, int]:
    for line in _read(membership).splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _existing(root / "memory", path), 1
        if number == "0" and not controllers and (root / "cgroup.controllers").exists():
            return _existing(root, path), 2
    return None, 2


def _existing(mount: Path, path: str) -> Path | None:
    """The cgroup's folder; inside a container the path of /proc may be the host's, and ours is the mount itself."""
    for directory in (mount / path.lstrip("/"), mount):
        if directory.is_dir():
            return directory
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
