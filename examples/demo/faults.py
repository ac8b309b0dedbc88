"""The demo's faults: SIGKILL, without warning."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil

NODE_VARIABLE = "PERDURE_NODE"
"""Environment variable of every process of a node: `<uid>/<role>-<rank>/<incarnation>`."""


def processes_of_node(uid: str, role: str, rank: int) -> Iterator[psutil.Process]:
    """Yields every process of the node, including its agent, of all incarnations."""
    prefix = f"{uid}/{role}-{rank}/"
    for process in psutil.process_iter():
        try:
            if process.environ().get(NODE_VARIABLE, "").startswith(prefix):
                yield process
        except psutil.Error:
            continue


def kill_node(uid: str, role: str, rank: int) -> int:
    """Kills all processes of one node at once, like a power loss of its machine; returns their number."""
    victims = list(processes_of_node(uid, role, rank))
    for process in victims:
        process.suspend()
    return sum(_kill(process) for process in victims)


def kill_rank(uid: str, role: str, rank: int) -> int:
    """Kills one training process of a node; returns its pid.

    Raises:
        LookupError: if the node runs no training process.
    """
    for process in processes_of_node(uid, role, rank):
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        if "LOCAL_RANK" in environment and "GROUP_RANK" in environment and _kill(process):
            return process.pid
    raise LookupError(f"node {rank} runs no training process")


def _kill(process: psutil.Process) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        process.kill()
    except psutil.Error:
        return False
    return True
