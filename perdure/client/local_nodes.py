"""The nodes whose files are on this machine, by their backend: for logs and shells, which then need no agent."""

from __future__ import annotations

from perdure.activities.nodes.joined.machine import joined_nodes
from perdure.activities.nodes.local.folders import NodeFolders
from perdure.base.state_folder import default_path
from perdure.spec.job import Backend


def nodes_here(backend: str) -> NodeFolders | None:
    """Returns the folders of a backend's nodes on this machine; None for a backend whose nodes keep no files here."""
    match backend:
        case Backend.LOCAL:
            return NodeFolders(default_path())
        case Backend.JOINED | Backend.RAY:
            return joined_nodes()
        case _:
            return None
