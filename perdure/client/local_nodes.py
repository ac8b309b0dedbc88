"""The nodes whose files are on this machine, by their backend: for logs and shells, which then need no agent."""

from __future__ import annotations

import contextlib
import signal

from perdure.activities.nodes.joined.machine import joined_nodes
from perdure.activities.nodes.local.folders import NodeFolders
from perdure.base.state_folder import default_path
from perdure.contract.names import job_workflow_id
from perdure.spec.job import Backend
from perdure_launcher.system.user_signals import REQUESTS


def nodes_here(backend: str) -> NodeFolders | None:
    """Returns the folders of a backend's nodes on this machine; None for a backend whose nodes keep no files here."""
    match backend:
        case Backend.LOCAL:
            return NodeFolders(default_path())
        case Backend.JOINED | Backend.RAY:
            return joined_nodes()
        case _:
            return None


def pass_on(number: signal.Signals, *, namespace: str, name: str) -> None:
    """Has the launchers of a job's nodes on this machine send a signal to the ranks that handle it."""
    job = job_workflow_id(namespace, name)
    for folder in NodeFolders(default_path()).running_nodes():
        record, launcher = folder.record, folder.launcher
        if record is None or record.job_id != job or launcher is None:
            continue
        with launcher.open_pidfd() as descriptor, contextlib.suppress(ProcessLookupError):
            if descriptor is not None:
                signal.pidfd_send_signal(descriptor, REQUESTS[number])
