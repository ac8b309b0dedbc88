"""Remembers what checks of this machine have measured before, so that a machine that has become slower is found even
where no other one is like it.

Only checks beside which no rank trains are remembered: what a training leaves of a processor says nothing about it. The
folder is the machine's, and several agents may write to it at once: a figure that is lost is less evidence.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from pydantic import BaseModel

from perdure.base.files import read_record, write_private_file
from perdure.contract.checks import Check

logger = logging.getLogger(__name__)

_KINDS = ("processor", "memory", "disk", "matmul")
"""The checks whose figures say how fast the machine is."""
_LEAST = 5
"""Figures below which nothing is usual."""
_KEPT = 32
"""Figures of one subject: a machine that stays slower is as usual after half as many checks."""
_MOST_SUBJECTS = 32
"""Devices and folders of one check."""


class _Figures(BaseModel):
    """The figures of one check, by what was checked, the newest last."""

    by_subject: dict[str, tuple[float, ...]] = {}


class MachineHistory:
    """The earlier figures of one machine: a file for each check."""

    def __init__(self, folder: Path | None) -> None:
        """Creates the object.

        Args:
            folder: The machine's folder, which outlives its nodes; None where there is none.
        """
        self._folder = folder

    def take(self, checks: Sequence[Check]) -> tuple[Check, ...]:
        """Adds to each check what is usual on this machine, and remembers its figure."""
        if self._folder is None:
            return tuple(checks)
        known = {kind: self._read(kind) for kind in {check.name for check in checks}.intersection(_KINDS)}
        compared = tuple(_compare(check, known[check.name]) if check.name in known else check for check in checks)
        for check in checks:
            if check.name in known and check.value is not None and not check.problem:
                known[check.name] = _add(known[check.name], check.subject, check.value)
        for kind, figures in known.items():
            self._write(kind, figures)
        return compared

    def _read(self, kind: str) -> _Figures:
        assert self._folder is not None
        try:
            return read_record(self._folder / f"{kind}.json", _Figures) or _Figures()
        except OSError as error:
            logger.warning("earlier checks of this machine cannot be read: %s", error)
            return _Figures()

    def _write(self, kind: str, figures: _Figures) -> None:
        assert self._folder is not None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_private_file(self._folder / f"{kind}.json", figures.model_dump_json().encode())
        except OSError as error:
            logger.warning("what checks of this machine have measured cannot be remembered: %s", error)


def _compare(check: Check, figures: _Figures) -> Check:
    earlier = figures.by_subject.get(check.subject, ())
    return check.replace(usual=median(earlier), earlier=len(earlier)) if len(earlier) >= _LEAST else check


def _add(figures: _Figures, subject: str, value: float) -> _Figures:
    others = {name: values for name, values in figures.by_subject.items() if name != subject}
    newest = (*figures.by_subject.get(subject, ()), value)[-_KEPT:]
    return _Figures(by_subject=dict([*others.items(), (subject, newest)][-_MOST_SUBJECTS:]))
