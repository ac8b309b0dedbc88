"""What DLRover 0.6.1 does when a part of a job of several roles dies, as its own source has it.

Its parameter servers need a cluster with its operator, and its unified controller a Ray cluster: neither was run here.
"""

from __future__ import annotations

from typing import NamedTuple


class Documented(NamedTuple):
    """One behavior."""

    system: str
    killed: str
    behavior: str
    source: str
    """The file in DLRover's package."""


DLROVER = (
    Documented(
        "parameter servers",
        "a parameter server",
        "chief and workers look every 10 s whether its address has changed, end with code 2, and are started again",
        "trainer/tensorflow/failover/tensorflow_failover.py",
    ),
    Documented(
        "parameter servers",
        "set of servers changed",
        "after the next look, every 10 s, the chief saves, and all read TF_CONFIG again",
        "trainer/tensorflow/failover/tensorflow_failover.py",
    ),
    Documented(
        "unified controller",
        "a worker of a role with a sub-master (elastic training)",
        "the role's own failover",
        "python/unified/controller/manager.py: _do_failover",
    ),
    Documented(
        "unified controller",
        "a worker of another role, such as a rollout",
        "the whole job is started again",
        "python/unified/controller/manager.py: _do_failover",
    ),
)
