"""The other roles of a job, from training scripts; docs/roles.md is the guide.

    from perdure_training import roles

    ps = roles.wait_for("ps")
    print(ps.addresses)
    score = roles.call("reward", "score", trajectory)

`perdure_training.roles.queue` hands items from one role to another. All of it needs the standard library only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perdure_training.roles.directory import Role, RoleTimeout, addresses, known, wait_for, watch

if TYPE_CHECKING:
    from perdure_training.roles.rpc import CallFailed, CallTimeout, RoleUnavailable, call, export

__all__ = [
    "CallFailed",
    "CallTimeout",
    "Role",
    "RoleTimeout",
    "RoleUnavailable",
    "addresses",
    "call",
    "export",
    "known",
    "wait_for",
    "watch",
]


def __getattr__(name: str) -> Any:
    # Calls need the job's store, which imports torch where it is installed.
    if name in __all__:
        from perdure_training.roles import rpc

        return getattr(rpc, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
