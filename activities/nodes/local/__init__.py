"""Nodes as processes on this machine, independent of the process that started them."""
