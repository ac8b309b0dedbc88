"""Nodes that a user or a scheduler started, and that join by `perdure join`: only places are kept open for them."""

from activities.nodes.joined.backend import JoinedBackend

__all__ = ["JoinedBackend"]
