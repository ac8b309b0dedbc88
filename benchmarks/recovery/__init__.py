"""How long a killed training job is stopped: plain torchrun, DLRover and Perdure, side by side in one run.

A claim of being faster is worth something only where the others run beside it, on the same machine, with the same
script and the same faults. `python -m benchmarks.recovery --help` tells what can be chosen.
"""
