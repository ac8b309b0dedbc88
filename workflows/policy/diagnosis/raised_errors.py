"""Tells whether two errors of a script are the same one: by the exception's type and the line that raised it.

The message is not compared: it may hold addresses, sizes and samples. The line is the innermost one outside of
installed packages, since one line of a package serves many callers.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

_FRAME = re.compile(r'^[ \t]{0,40}File "(?P<file>[^"\n]{1,1000})", line (?P<line>\d{1,12})', re.MULTILINE)

_INSTALLED = re.compile(r"/(site-packages|dist-packages|python3(\.\d{1,3})?)/|^<")

_MAY_PASS = re.compile(
    r"time(d )?[ -]?out|connection|temporar|unavailable|try again|\bbusy\b|uncorrectable"
    r"|^([\w.]{1,100}\.)?(OS|IO|HTTP)Error\b",
    re.IGNORECASE,
)
"""Errors about what is outside of the job, or of a memory that repairs itself. The same one twice proves nothing."""


def raised_at(error: str | None, traceback: str | None) -> str:
    """Returns the type of an exception and the line that raised it, such as `ValueError at train.py:12`.

    Args:
        error: Its type and message.
        traceback: Its traceback, or the end of it.

    Returns:
        Empty where one of both is not known, or where the error may pass by itself.
    """
    frames = [(match["file"], match["line"]) for match in _FRAME.finditer(traceback or "")]
    if not error or not frames or _MAY_PASS.search(error):
        return ""
    own = [frame for frame in frames if not _INSTALLED.search(frame[0])]
    file, line = (own or frames)[-1]
    return f"{error.partition(':')[0].strip()} at {PurePosixPath(file).name}:{line}"
