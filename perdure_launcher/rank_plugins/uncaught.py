"""Writes the uncaught exception that ends a rank to the file that torch's own `@record` uses, for scripts without it.

Scripts replace `sys.excepthook`: to print tracebacks in color, or to end at once by `os._exit`, which also loses what
torch's own hook has printed until then. So the hook takes the first place again whenever the rank forms its process
group or steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from perdure_training.node_api.rank_environment import is_rank_itself

FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"

_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class _Hook:
    """Keeps an exception, and then calls the hook that it has replaced."""

    def __init__(self, path: str, counts: Callable[[], bool]) -> None:
        self._path = path
        self._counts = counts
        self._following: _ExceptHook = getattr(sys, "excepthook", sys.__excepthook__)

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(Exception):
            self._keep(error)
        self._following(kind, error, trace)

    def again(self) -> _Hook:
        """Returns a hook that calls the present one."""
        return _Hook(self._path, self._counts)

    def _keep(self, error: BaseException) -> None:
        if not self._counts():
            return
        from ..system.files import write_file
        from .error_file import error_content, is_kept_already

        error = _first_of_group(error)
        callstack = "".join(traceback.format_exception(error))
        if not is_kept_already(self._path, error):
            # When a peer has failed, ranks are killed while they write, and torchrun fails on a partial file.
            write_file(self._path, json.dumps(error_content(error, callstack)))


_hook: _Hook | None = None


def keep_exceptions(counts: Callable[[], bool]) -> None:
    """Keeps the exception that ends this process.

    Args:
        counts: Whether the process that ends, this one or a fork of it, speaks for its rank then.
    """
    global _hook
    path = os.environ.get(FILE_VARIABLE)
    if not path or path == os.devnull:
        return
    if is_rank_itself(os.environ) and os.path.exists(path):
        _remove_left_error(path)
    sys.excepthook = _hook = _Hook(path, counts)


def stay_first() -> None:
    """Puts the hook before one that the script has set since."""
    global _hook
    if _hook is not None and getattr(sys, "excepthook", None) is not _hook:
        sys.excepthook = _hook = _hook.again()


def _first_of_group(error: BaseException) -> BaseException:
    """Returns the first exception of a group, as of tasks that ran side by side; the group's own text is the same for
    all of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _remove_left_error(path: str) -> None:
    """Removes the error of a process that was the rank before this one, and whose end the command has survived."""
    from .error_file import writer_of

    if writer_of(path) not in (None, os.getpid()):
        with contextlib.suppress(OSError):
            os.unlink(path)
