"""Measures how many shards one dataset leases, how long ranks wait for them, and how large its state becomes."""
