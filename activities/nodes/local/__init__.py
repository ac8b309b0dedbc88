"""Nodes as processes on this machine, independent of the process that started them."""

from activities.nodes.local.backend import LocalBackend

__all__ = ["LocalBackend"]
