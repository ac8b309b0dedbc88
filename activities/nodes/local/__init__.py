"""Nodes as processes on this machine, independent of the process that started them."""

from activities.nodes.local.backend import LocalBackend
from activities.nodes.local.folders import state_folder

__all__ = ["LocalBackend", "state_folder"]
