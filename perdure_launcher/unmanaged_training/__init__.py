"""Finds training that takes no part in the job's world: from inside its processes, and from the node's process table."""
