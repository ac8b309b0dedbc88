"""Compares the sizes that a command gives to torchrun with those of the specification, and warns where one is not used.

A command line from elsewhere often still has its `--nnodes`. Perdure's rendezvous forms worlds of the job's nodes, so
the training would be smaller than its command says, and succeed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .backends import SpecWarning
from .importers.launchers import LauncherError, Use, read_launch
from .job import JobSpec
from .roles import RendezvousMode

_NODES = re.compile(r"(\d+)(?::(\d+))?")


def find_unused_sizes(spec: JobSpec) -> Iterator[SpecWarning]:
    """Yields a warning for each size of the world that has two values. Variables of a shell are not compared."""
    for name, role in spec.roles.items():
        if role.rendezvous is RendezvousMode.ENV:
            continue
        try:
            launch = read_launch(role.command)
        except LauncherError:
            continue
        if launch is None:
            continue
        location = ("roles", name, "command")
        nodes = launch.last(Use.NODES)
        if nodes and (read := _NODES.fullmatch(nodes.value)):
            least, most = int(read[1]), int(read[2] or read[1])
            if (least, most) != (role.nodes.min, role.nodes.max):
                of_job = role.nodes.min if role.nodes.min == role.nodes.max else f"{role.nodes.min}:{role.nodes.max}"
                yield SpecWarning(
                    location=location,
                    message=f"{nodes.written} {nodes.value} of torchrun is not used: the role has {of_job} "
                    f"{'node' if of_job == 1 else 'nodes'}, by its nodes (--nodes of `perdure run`)",
                )
        processes = launch.last(Use.PROCESSES)
        if processes and role.nproc_per_node != "auto" and processes.value != str(role.nproc_per_node):
            yield SpecWarning(
                location=location,
                message=f"{processes.written} {processes.value} of torchrun is used, and nproc_per_node "
                f"{role.nproc_per_node} is not; write the same number, or leave one of them out",
            )
