"""Programs that tests need and that are made before the first test: making them takes longer than a test may."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts.cluster.binaries import BinariesMissing


def report(line: str) -> None:
    """Prints a line past pytest's capture: of several processes that run tests one makes a program."""
    print(line, file=sys.stderr, flush=True)


class Programs:
    """Programs by the names of the fixtures that provide them."""

    def __init__(self, makers: Mapping[str, Callable[[], Path]]) -> None:
        """Creates the object.

        Args:
            makers: Finds or makes each program. It raises `BinariesMissing`.
        """
        self._makers = makers
        self._missing: dict[str, str] = {}

    def make(self, config: pytest.Config, items: Iterable[pytest.Item]) -> None:
        """Makes the programs that these tests ask for."""
        asked = {name for item in items for name in getattr(item, "fixturenames", ())}
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            for name in asked & self._makers.keys():
                try:
                    self._makers[name]()
                except BinariesMissing as missing:
                    self._missing[name] = str(missing)

    def path(self, name: str) -> Path:
        """Returns a program; the test fails where there is none, since no other test shows what it shows."""
        if reason := self._missing.get(name):
            pytest.fail(reason, pytrace=False)
        return self._makers[name]()
