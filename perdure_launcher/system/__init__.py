"""Reads this machine: processes, memory controllers, network interfaces, ports and GPUs."""
