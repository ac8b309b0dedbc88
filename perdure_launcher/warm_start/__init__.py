"""Warm starts: ranks start from a process that has already imported torch, instead of importing it again.

torchrun starts each rank with the executable in `PYTHON_EXEC`. This is our *shim* (`shim`): it has a *warm interpreter*
(`interpreter`) fork the rank, and then represents the rank to torchrun: it lives as long, receives its signals and ends
with its exit status. The warm interpreter was started with the ranks' own command line and environment, and waits
inside Python's start-up, just before the script would run. So a forked rank continues exactly as a started one would:
its `__main__`, arguments, tracebacks, exit and multiprocessing are Python's own.

Imports that do not survive a fork (threads, a GPU's driver) or that depend on the rank's number are made by *standbys*
(`standbys`, `standby`): interpreters that stop at the same point, one per rank, each of which becomes that rank once.
`start_method` decides whether there are any.

Any difference between the warm interpreter and the rank (`context`), and any error, leads to an ordinary cold start,
with the reason recorded.
"""
