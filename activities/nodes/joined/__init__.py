"""Nodes that a user or a scheduler started and that join with `perdure join`; the backend only provides node slots."""
