"""Nodes as detached actors of an existing Ray cluster, whose bundles are reserved by placement groups."""
