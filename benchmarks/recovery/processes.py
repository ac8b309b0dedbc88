"""Processes of a trial: starts them in sessions of their own, finds descendants, and kills them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

Found = TypeVar("Found")

POLL_SECONDS = 0.02

QUIET_NETWORK = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
"""Variables for all systems: thread pools do not compete for the cores, and gloo does not resolve the hostname."""


class TrialFailed(Exception):
    """The job did not reach the expected state; the message says how far it came."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def start(command: Sequence[str | Path], *, env: Mapping[str, str], log: Path) -> asyncio.subprocess.Process:
    """Starts a process in a session of its own, with its output in a file."""
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *map(str, command),
            env={**os.environ, **QUIET_NETWORK, **env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )


def tree(pid: int) -> list[psutil.Process]:
    """Returns a process and all its descendants, parents first."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill(processes: Iterable[psutil.Process]) -> float:
    """Sends SIGKILL to all processes in quick succession. Returns the time, in seconds since the epoch."""
    victims = list(processes)
    when = time.time()
    for process in victims:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    return when


async def eventually(look: Callable[[], Found | None], *, seconds: float, otherwise: str) -> Found:
    """Polls until there is a result.

    Raises:
        TrialFailed: with `otherwise`, if there is no result within the limit.
    """
    deadline = time.monotonic() + seconds
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise TrialFailed(f"{otherwise} within {seconds:.0f} s")
        await asyncio.sleep(POLL_SECONDS)
    return found


def in_pid_namespace(command: Sequence[str | Path]) -> list[str]:
    """Wraps a command so that it sees only its own processes, and none of them outlives it.

    DLRover's agents kill every process on the machine that looks like an orphaned worker. The shell is the namespace's
    first process and reaps orphans.
    """
    isolate = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if os.geteuid() != 0:
        isolate += ["--user", "--map-root-user"]
    return [*isolate, "sh", "-c", '"$@"; exit $?', "sh", *map(str, command)]


def with_own_memory(command: Sequence[str | Path]) -> list[str]:
    """Wraps a node's command so that it has shared memory of its own, in which DLRover keeps its flash checkpoints.

    Nodes of one job use the same names there, and in the folder of DLRover's sockets. The caller is root, if only in a
    namespace.
    """
    prepare = "mkdir -p /tmp/ckpt_sock && mount -t tmpfs tmpfs /tmp/ckpt_sock && mount -t tmpfs tmpfs /dev/shm"
    return ["unshare", "--mount", "sh", "-c", f'{prepare} && exec "$@"', "sh", *map(str, command)]


async def pid_namespaces_work() -> bool:
    try:
        probe = await asyncio.create_subprocess_exec(
            *in_pid_namespace([sys.executable, "-c", "pass"]), stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:
        return False
    return await probe.wait() == 0
