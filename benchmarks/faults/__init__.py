"""Injects one known fault at a time, and compares what a job finds and does with what must come out."""
