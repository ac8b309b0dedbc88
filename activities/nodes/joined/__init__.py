"""Nodes that somebody else started, and that join by `perdure join`: places are kept open for them, and no more."""

from activities.nodes.joined.backend import JoinedBackend

__all__ = ["JoinedBackend"]
