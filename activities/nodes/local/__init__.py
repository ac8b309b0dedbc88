"""Nodes as processes on this machine, alive independently of whoever started them."""

from activities.nodes.local.backend import LocalBackend
from activities.nodes.local.folders import state_folder

__all__ = ["LocalBackend", "state_folder"]
