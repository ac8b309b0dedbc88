"""A split state that worlds of other sizes continue from memory: `make bench-state`."""
