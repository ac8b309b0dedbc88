"""Compares the environment of a forked rank at its script's first import of torch with the one that torch was imported
in: the script may have set variables before, by itself or in a module, that torch and its libraries have read already.

Such a rank starts again as a new process, with the same PID. What the script did before that import is done again.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import learning
from .messages import log
from .names import record_start
from .traces import changes

_MODULES = ("torch",)


def compare_at_first_import(
    *,
    find_contradiction: Callable[[Mapping[str, str | None]], str],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
) -> None:
    """Has this rank start again at its script's first import of torch if the variables that it has set until then
    contradict the imports that were made in advance. Call it last: nothing but the script may import torch after it.

    Args:
        find_contradiction: Says why a rank with these changes of its variables must not be started from those imports;
            empty if it may be.
        arguments: Python's arguments.
        environment: The variables of the rank's request.
        folder: The folder of warm starts, for the record of the start.
    """
    own, began, place = os.getpid(), dict(os.environ), os.getcwd()

    def compare() -> None:
        changed = changes(began, dict(os.environ))
        if os.getpid() != own or not changed or not (reason := find_contradiction(changed)):
            return
        log(f"a rank starts again: {reason}")
        record_start(folder, warm=False, reason=reason)
        learning.tell(modules=())
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        with contextlib.suppress(OSError):
            os.chdir(place)
            os.execve(sys.executable, [sys.executable, *arguments], dict(environment))

    _call_at_first_import(compare)


class _Watched(importlib.machinery.ModuleSpec):
    """The specification of a module whose import is awaited: Python asks each time whether it is being initialized."""

    @property
    def _initializing(self) -> bool:
        _first_import()
        return False

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        pass


_awaited: list[Callable[[], None]] = []
_watched: list[importlib.machinery.ModuleSpec] = []


def _call_at_first_import(function: Callable[[], None]) -> None:
    _awaited.append(function)
    for name, module in list(sys.modules.items()):
        spec: Any = getattr(module, "__spec__", None)
        if name.partition(".")[0] in _MODULES and type(spec) is importlib.machinery.ModuleSpec:
            spec.__class__ = _Watched
            _watched.append(spec)


def _first_import() -> None:
    while _watched:
        spec: Any = _watched.pop()
        spec.__class__ = importlib.machinery.ModuleSpec
    while _awaited:
        _awaited.pop()()
