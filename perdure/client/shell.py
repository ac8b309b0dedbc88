"""Commands that open a shell in a node: on this machine itself, or by `kubectl exec` in the node's pod.

They need no agent and no worker, because a shell is for the moment when something is wrong.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from perdure.activities.nodes.containers import SHELL, TRAINING
from perdure.activities.nodes.local.folders import NodeFolder, NodeFolders
from perdure.activities.nodes.local.launch import program
from perdure.base.errors import PerdureError, Refused
from perdure.client.local_nodes import nodes_here
from perdure.contract import JobStatus, NodeId, NodePhase, NodeView
from perdure.contract.names import node_name

_NOT_THERE = (NodePhase.REQUESTED, NodePhase.PENDING, NodePhase.LOST, NodePhase.REMOVED)


@dataclass(frozen=True)
class ShellCommand:
    """A command to run on this machine."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables that are added to the inherited environment."""
    inherited: Mapping[str, str] | None = None
    """The inherited environment, if it is not this process's own."""

    def __str__(self) -> str:
        """The command in a shell's syntax."""
        return shlex.join([*(f"{name}={value}" for name, value in self.environment.items()), *self.words])


def node_to_enter(status: JobStatus, nodes: Sequence[NodeView], rank: int | None) -> NodeView:
    """The requested node; by default the one where the last incident began, else the first.

    Raises:
        Refused: if the node does not exist.
    """
    there = [node for node in nodes if node.phase not in _NOT_THERE]
    culprit = status.last_incident.culprit if status.last_incident else None
    chosen = next((node for node in there if node.rank == (culprit if rank is None else rank)), None)
    if chosen is None and rank is None and there:
        chosen = there[0]
    if chosen is None:
        known = ", ".join(str(node.rank) for node in there) or "none"
        raise Refused(
            f"{status.name} is {status.phase} and has no {'node' if rank is None else f'node {rank}'} to enter; "
            f"nodes that are there: {known}",
            remedy="`hold_on_failure` in the job's specification keeps the nodes of a failed job.",
        )
    return chosen


def shell_command(status: JobStatus, node: NodeView, command: Sequence[str], *, terminal: bool) -> ShellCommand:
    """Returns the command that opens a shell in the node, or runs a command there.

    Args:
        status: The job's status.
        node: An existing node.
        command: The command to run instead of a shell.
        terminal: Whether a user sits at a terminal.

    Raises:
        PerdureError: if the node is on another machine.
    """
    nodes = nodes_here(status.backend)
    if nodes is None:
        return _in_its_pod(status, node, command, terminal=terminal)
    return _on_this_machine(nodes, status, node, command)


def _in_its_pod(status: JobStatus, node: NodeView, command: Sequence[str], *, terminal: bool) -> ShellCommand:
    named = NodeId(uid=status.uid, role=status.role, rank=node.rank, incarnation=node.incarnation)
    pod = node_name(status.name, named)
    where = ("-n", status.namespace, pod, "-c", TRAINING)
    words = ("kubectl", "exec", "-it" if terminal else "-i", *where, "--", "/bin/sh", "-c", SHELL, "sh", *command)
    return ShellCommand(words)


def _on_this_machine(nodes: NodeFolders, status: JobStatus, node: NodeView, command: Sequence[str]) -> ShellCommand:
    for folder in nodes.of_job(status.uid, status.role):
        record = folder.record
        if record is not None and (record.rank, record.incarnation) == (node.rank, node.incarnation):
            ours = {
                "PERDURE_RUN_DIR": str(folder.run_dir),
                "PERDURE_LAUNCHER_CONFIG": str(Path(folder.path) / "launcher.json"),
            }
            words = (*program("perdure_launcher"), "shell", *command)
            return ShellCommand(words, environment=ours, inherited=_environment_of(folder))
    raise PerdureError(
        f"node {node.rank} of {status.name} is on another machine: {node.host or node.address}",
        remedy=f"Log in there and run: perdure shell {status.name} --node {node.rank}",
    )


def _environment_of(folder: NodeFolder) -> Mapping[str, str] | None:
    """The environment with which the node was started, if the kernel still has it."""
    launcher = folder.launcher
    if launcher is not None and launcher.alive:
        with suppress(psutil.Error):
            # The terminal is that of the user who enters.
            return psutil.Process(launcher.pid).environ() | {
                name: os.environ[name] for name in ("TERM",) if name in os.environ
            }
    return None
