"""Ranks that start warm: from a process that has already imported torch, instead of importing it again.

torchrun starts each rank through `PYTHON_EXEC`. That is our *stand-in* (`stand_in`): it has a *warm interpreter*
(`interpreter`) fork the rank, and then lives, is signalled and dies in its place. The warm interpreter was started with
the ranks' own command line and environment, and waits inside Python's start, just before the script would run. So a
forked rank does what the started one would have done next, and by Python itself: its `__main__`, arguments, tracebacks,
exit and multiprocessing are the real ones.

What does not survive a fork (threads, a GPU's driver) or depends on a rank's place is imported by *standbys*
(`standbys`, `standby`): interpreters that stop in the same place, one per rank, each of which becomes that rank once.
`ways` says when there are any.

Whatever is not exactly equal (`context`), or goes wrong, leads to an ordinary start, with the reason kept.
"""
