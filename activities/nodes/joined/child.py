"""Becomes a program that ends when its parent does. Run as a script, in an interpreter of its own.

A scheduler or the kernel that kills `perdure join` ends the node with it: nothing may be left that an allocation
does not account for. The parent cannot arrange that between fork and exec, since its threads make that unsafe.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """`child.py PARENT COMMAND…`."""
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):
        # It died before the kernel was asked.
        sys.exit(1)
    # A shell has what it starts in the background ignore it, and exec passes that on.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execvpe(command[0], command, os.environ)


if __name__ == "__main__":
    main()
