"""Runs `perdure` in a process that was forked from an interpreter which has imported it.

What the interpreter derived from its own environment, working directory and streams is derived again from those of the
command.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import termios
from importlib.util import find_spec, module_from_spec

from perdure.cli import common, main
from tests.support.command_imports import COMMAND


def run_command() -> None:
    """Runs the command of `sys.argv`, on the terminal that it writes to, if it does."""
    sys.argv[0] = str(main.__file__)
    if os.isatty(1):
        fcntl.ioctl(1, termios.TIOCSCTTY, 0)
        os.dup2(1, 0)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # pyrefly: ignore[missing-attribute]
    tempfile.tempdir = None
    _renew_consoles()
    main.app = COMMAND  # pyrefly: ignore[bad-assignment]
    main.main()


def _renew_consoles() -> None:
    """Gives the consoles, which all commands have imported, the state that they have where they are first created."""
    spec = find_spec(common.__name__)
    assert spec
    assert spec.loader
    fresh = module_from_spec(spec)
    spec.loader.exec_module(fresh)
    for known, new in ((common.out, fresh.out), (common.err, fresh.err)):
        known.__dict__ = new.__dict__


if __name__ == "__main__":
    run_command()
