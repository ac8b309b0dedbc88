"""Measures how many calls the store of a job takes, and how long ranks wait for its answers."""
