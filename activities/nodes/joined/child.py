"""Script that replaces itself with a program that ends when its parent ends. Runs in an interpreter of its own.

If a scheduler or the kernel kills `perdure join`, the node ends with it: no process may outlive its allocation. The
parent cannot arrange that between fork and exec, since its threads make that unsafe.
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
        # The parent died before prctl was called.
        sys.exit(1)
    # A shell makes background processes ignore SIGINT, and exec would pass that on.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execvpe(command[0], command, os.environ)


if __name__ == "__main__":
    main()
