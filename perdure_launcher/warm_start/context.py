"""The context of a process beyond its program and environment: user, limits, CPU affinity, namespaces and the like.

A forked rank inherits these from the warm interpreter, a started one from torchrun. Nothing is copied from one to the
other: if they differ at all (because of a wrapper that binds ranks to cores, say), the rank starts cold.
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
    """Returns the context of this process. It is equal for two processes that the same parent starts in the same
    way."""
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
    # The policy of the first mapping is the process's own, unless a library has changed the policy of that mapping.
    found["memory policy"] = " ".join(_read("numa_maps", 200).split(maxsplit=2)[1:2])
    return found


def difference(one: dict[str, str], other: dict[str, str]) -> str:
    """Returns the names of the values that differ; empty if none does."""
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
