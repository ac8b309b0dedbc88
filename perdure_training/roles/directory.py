"""Where the other roles of a job are, and how far: the newest that the node's agent knows.

PERDURE_ROLES in the environment is as it was when the process started, in jobs of few enough nodes for a variable.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from perdure_training.node_api.layout import ROLES
from perdure_training.node_api.rank_environment import ROLES_VARIABLE, run_directory_of

_LOOK = 0.2
"""Seconds between two looks at the file of the agent, which costs a few microseconds."""


class RoleTimeout(TimeoutError):
    """A role was not ready in time."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """Where one role is, and how far."""

    name: str
    addresses: tuple[str, ...] = ()
    """The address of each node of its world, in their order, as HOST:PORT where the role has a port; empty where it is
    not known at the moment. In a role with `ready` it is by rank, and empty for a node that the role lacks."""
    generation: int = 0
    """Its newest world; a greater one follows each restart."""
    processes: int = 0
    """The ranks of that world."""
    ready: bool = False
    """All its nodes run, or answer."""
    completed: bool = False
    """Its commands have ended with 0."""


def known() -> dict[str, Role]:
    """Returns all roles of the job by name; none in a job of one role, and outside of Perdure."""
    return {name: _role(name, fields) for name, fields in _read().items()}


def addresses(name: str) -> tuple[str, ...]:
    """Returns the addresses of a role's nodes.

    Raises:
        KeyError: if the job has no such role.
    """
    return role_named(name).addresses


def wait_for(name: str, *, timeout: timedelta | None = None) -> Role:
    """Waits until all nodes of a role run or answer, and returns it; one that has completed is returned at once.

    Args:
        name: The role.
        timeout: The longest wait; None waits as long as it takes.

    Raises:
        KeyError: if the job has no such role.
        RoleTimeout: if it is not ready in time.
    """
    end = None if timeout is None else time.monotonic() + timeout.total_seconds()
    while not ((role := role_named(name)).ready or role.completed):
        if end is not None and time.monotonic() >= end:
            raise RoleTimeout(f"role {name} is not ready after {timeout}; its newest world is {role.generation}")
        time.sleep(_LOOK)
    return role


def watch() -> Iterator[dict[str, Role]]:
    """Yields all roles, and again whenever one has changed, without an end."""
    seen: dict[str, Role] | None = None
    while True:
        if (newest := known()) != seen:
            seen = newest
            yield newest
        else:
            time.sleep(_LOOK)


def role_named(name: str) -> Role:
    """Returns a role.

    Raises:
        KeyError: if the job has no such role.
    """
    roles = known()
    if name not in roles:
        raise KeyError(f"role {name}: this job has {', '.join(roles) or 'no other roles'}")
    return roles[name]


def _read() -> Mapping[str, Mapping[str, Any]]:
    directory = run_directory_of(os.environ)
    try:
        content = (directory / ROLES).read_text(encoding="utf-8") if directory is not None else ""
    except OSError:
        content = ""
    return json.loads(content or os.environ.get(ROLES_VARIABLE) or "{}")


def _role(name: str, fields: Mapping[str, Any]) -> Role:
    return Role(
        name=name,
        addresses=tuple(fields.get("addresses", ())),
        generation=fields.get("generation", 0),
        processes=fields.get("processes", 0),
        ready=fields.get("ready", False),
        completed=fields.get("completed", False),
    )
