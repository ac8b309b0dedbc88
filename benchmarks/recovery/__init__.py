"""Measures how long a killed training job is interrupted: plain torchrun, DLRover and Perdure, side by side in one run.

A claim of being faster needs the others to run beside it, on the same machine, with the same script and the same
faults. `python -m benchmarks.recovery --help` lists the options.
"""
