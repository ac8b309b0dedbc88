"""Standard streams that are closed when a program starts, as `>&-` of a shell and some batch systems do it.

The first file that such a program opens would become its standard output, and Python has no object to print to.
"""

from __future__ import annotations

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
