"""Standard streams on which a program could not print as it begins.

Of streams that are closed, as `>&-` of a shell and some batch systems do it, the first file that the program opens
would become its standard output, and Python has no object to print to. A terminal or a log that is not in UTF-8 takes
no character that its encoding lacks: Python raises an error in the middle of a line.
"""

from __future__ import annotations

import io
import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_closed_streams() -> None:
    """Opens /dev/null in place of standard streams that are closed. Processes that are started inherit it."""
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free, as those below it are taken.
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.dup2(descriptor, number, inheritable=True)
            if descriptor != number:
                os.close(descriptor)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", errors="replace", closefd=False))  # noqa: SIM115


def print_any_character() -> None:
    """Has standard output show what its encoding lacks as escapes, as Python's standard error does."""
    stdout = sys.stdout
    if isinstance(stdout, io.TextIOWrapper) and (stdout.errors == "strict" or stdout.encoding.lower() != "utf-8"):
        stdout.reconfigure(errors="backslashreplace")
