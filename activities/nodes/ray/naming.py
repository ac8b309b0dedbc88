"""The names of a job's actors, for worker and bridge alike: nothing but the standard library."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LONGEST = 63
"""The most characters of a node's name: a job's is shortened for it, as `perdure.contract.names.node_name` says."""
_DIGITS = 12
"""Of rank and incarnation together, at most."""


def names_of(job: str, roles: Iterable[str], uid: str) -> str:
    """Returns the pattern of the names of the nodes of roles; its groups are rank and incarnation.

    The name of a role may end that of another one, as `worker` ends `eval-worker`, so the job's name is a part of it.
    """
    roles = sorted(roles)
    whole = re.escape(job)
    if len(job) + max(map(len, roles)) + len(uid) + _DIGITS + 3 > _LONGEST:
        cuts = dict.fromkeys(job[:length].rstrip("-") for length in range(len(job) - 1, 0, -1))
        whole = f"(?:{whole}|(?=.{{{_LONGEST - 2},{_LONGEST}}}$)(?:{'|'.join(map(re.escape, cuts))}))"
    return rf"{whole}-(?:{'|'.join(map(re.escape, roles))})-(\d+)-{re.escape(uid)}(\d+)"
