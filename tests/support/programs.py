"""Programs that the package registry lacks: each is found, installed or built before the first test that asks for it.

Tests that ask for one by its fixture belong to `make test-cluster` and the long groups; `make test` needs none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts.browser import ensure_browser
from scripts.cluster import binaries
from scripts.cluster.binaries import BinariesMissing, Source
from scripts.cluster.cluster import why_not
from scripts.redis_server import ensure_redis

CLUSTER_OF_OTHERS = "KUBECONFIG"
"""The variable that names another cluster than the machine's own."""


def report(line: str) -> None:
    """Prints a line past pytest's capture: of several processes that run tests one makes a program."""
    print(line, file=sys.stderr, flush=True)


def _built(*sources: Source) -> Callable[[], Mapping[str, Path]]:
    return lambda: binaries.ensure(report, sources)


def _cluster() -> Mapping[str, Path]:
    if os.environ.get(CLUSTER_OF_OTHERS):
        return {}
    if reason := why_not():
        raise BinariesMissing(f"no Kubernetes cluster can run here: {reason}; set KUBECONFIG to use another one")
    return binaries.ensure(report, binaries.SOURCES)


_MAKERS: Mapping[str, Callable[[], Mapping[str, Path]]] = {
    "actionlint": _built(binaries.ACTIONLINT_SOURCE),
    "browser": lambda: {"browser": ensure_browser(report)},
    "cluster_programs": _cluster,
    "helm": _built(binaries.HELM_SOURCE),
    "object_store_program": _built(binaries.OBJECT_STORE_SOURCE),
    "prometheus_programs": _built(binaries.PROMETHEUS_SOURCE),
    "redis": lambda: {"redis": ensure_redis(report)},
    "temporal_program": _built(binaries.TEMPORAL_SERVER_SOURCE),
    "temporal_programs": _built(binaries.TEMPORAL_SERVER_SOURCE),
}
"""How each program is made, by the fixture that provides it."""

_missing: dict[str, str] = {}


def asked(item: pytest.Item) -> frozenset[str]:
    """Returns the fixtures of programs that a test asks for, directly or through others."""
    return frozenset(_MAKERS.keys() & set(getattr(item, "fixturenames", ())))


def make(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Makes the programs that these tests ask for: that takes longer than a test may."""
    names = sorted({name for item in items for name in asked(item)})
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        for name in names:
            try:
                _MAKERS[name]()
            except BinariesMissing as missing:
                _missing[name] = str(missing)


def paths(fixture: str) -> Mapping[str, Path]:
    """Returns a fixture's programs; the test fails where one is missing, since no other test shows what it shows."""
    if reason := _missing.get(fixture):
        pytest.fail(reason, pytrace=False)
    return _MAKERS[fixture]()
