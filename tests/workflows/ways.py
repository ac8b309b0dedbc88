"""How the worker of a test's fleet runs workflows: as the product's does, unless the test asks for another way.

Each message and each kind of workflow has one test that replays it at each task, and one in the sandbox; the others run
as in the product.
"""

from __future__ import annotations

from typing import Any

import pytest

AS_WORKERS_DO: dict[str, Any] = {}
REPLAYED: dict[str, Any] = {"max_cached_workflows": 0}
"""Nothing is kept in memory: each task begins with a replay of the whole history."""
SANDBOXED: dict[str, Any] = {"sandboxed": True}
"""In the SDK's sandbox, which refuses calls that are not deterministic, and does not see what a test changes."""

_LONG = pytest.mark.long("workflows")

replayed = pytest.mark.parametrize(
    "fleet",
    # The one that replays each task does all that the other one does.
    [pytest.param(AS_WORKERS_DO, id="cached", marks=_LONG), pytest.param(REPLAYED, id="replayed")],
    indirect=True,
)
also_replayed = pytest.mark.parametrize(
    "fleet",
    [pytest.param(AS_WORKERS_DO, id="cached"), pytest.param(REPLAYED, id="replayed", marks=_LONG)],
    indirect=True,
)
"""Replays each task in the long run only: what its messages do in a replay is shown by another test."""
sandboxed = pytest.mark.parametrize("fleet", [pytest.param(SANDBOXED, id="sandboxed")], indirect=True)
sandboxed_and_replayed = pytest.mark.parametrize(
    "fleet", [pytest.param(SANDBOXED | REPLAYED, id="sandboxed, replayed")], indirect=True
)
