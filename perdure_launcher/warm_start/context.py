"""What a process is besides its program and its environment: its user, limits, cores, namespaces and the like.

A forked rank inherits these from the warm interpreter, a started one from torchrun. Nothing is copied from one to the
other: where they differ at all (a wrapper that binds ranks to cores, say), the rank is started in the ordinary way.
"""

from __future__ import annotations

import os

_STATUS = (
    *("Umask", "Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "SigBlk", "SigIgn"),
    *("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "Cpus_allowed", "Mems_allowed"),
)
_FILES = ("limits", "cgroup", "oom_score_adj", "personality")
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")


def process_context() -> dict[str, str]:
    """This process's. Equal for two processes that a same parent starts in the same way."""
    found = {"cwd": os.getcwd(), "nice": str(os.getpriority(os.PRIO_PROCESS, 0)), "scheduler": _scheduler()}
    for line in _read("status").splitlines():
        name, _, value = line.partition(":")
        if name in _STATUS:
            found[name] = value.strip()
    for name in _FILES:
        found[name] = _read(name)
    for name in _NAMESPACES:
        try:
            found[f"ns/{name}"] = os.readlink(f"/proc/self/ns/{name}")
        except OSError:
            found[f"ns/{name}"] = ""
    # The policy of the first mapping is the process's own, unless a library has changed that mapping's.
    found["memory policy"] = " ".join(_read("numa_maps", 200).split(maxsplit=2)[1:2])
    return found


def difference(one: dict[str, str], other: dict[str, str]) -> str:
    """Names what differs; empty where nothing does."""
    return ", ".join(sorted(name for name in {*one, *other} if one.get(name) != other.get(name)))


def _scheduler() -> str:
    try:
        return f"{os.sched_getscheduler(0)}/{os.sched_getparam(0).sched_priority}"
    except OSError:
        return ""


def _read(name: str, size: int = 65536) -> str:
    try:
        with open(f"/proc/self/{name}", "rb") as file:
            return os.fsdecode(file.read(size))
    except OSError:
        return ""
