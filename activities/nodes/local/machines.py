"""This machine, with the nodes that run on it. Nothing reports a change of their folders, so they are looked at."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator
from typing import Final

from perdure.activities.nodes.local.folders import FolderOwner, NodeFolders
from perdure.activities.nodes.machines import Machines, MachineSeen, Owner, Use

_LOOK_EVERY: Final = 2.0
"""Seconds between two looks."""


async def follow(folders: NodeFolders) -> AsyncGenerator[Machines]:
    """Yields the machine at once, and again after changes of its nodes."""
    found = Machines()
    while True:
        if await asyncio.to_thread(_look, folders, found):
            found.events += 1
            yield found
        await asyncio.sleep(_LOOK_EVERY)


def _look(folders: NodeFolders, found: Machines) -> bool:
    """Returns whether anything has changed."""
    name, capacity = socket.gethostname(), folders.capacity
    limited = {} if capacity is None else {"nodes": float(capacity)}
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    machine = MachineSeen(capacity=limited | {"cpu": float(os.cpu_count() or 1), "memory": memory})
    uses = dict(_uses(folders, name, limited=capacity is not None))
    if found.machines.get(name) == machine and found.uses == uses:
        return False
    found.machines[name] = machine
    for gone in found.uses.keys() - uses.keys():
        found.drop(gone)
    for key, use in uses.items():
        found.put(key, use)
    return True


def _uses(folders: NodeFolders, machine: str, *, limited: bool) -> list[tuple[str, Use]]:
    requests = {"nodes": 1.0} if limited else {}
    found: list[tuple[str, Use]] = []
    for folder, record in folders.unended():
        launcher = folder.launcher
        if launcher is not None and not launcher.alive:
            continue
        reason = "" if launcher is not None else "no free slot"
        use = Use(machine if launcher is not None else "", requests, _owner(record), reason)
        found.append((folder.name, use))
    return found


def _owner(record: FolderOwner) -> Owner:
    return Owner(record.uid, record.role)
