"""Detects training that takes no part in the job's world: inside its processes, and in the node's process table."""
