"""Tests that each backend has one entry, which agrees with what is served."""

from __future__ import annotations

import pytest

from perdure.spec.capabilities import CAPABILITIES, complete
from perdure.spec.job import Backend


def test_a_backend_without_an_entry_is_refused_at_import():
    for backend in Backend:
        rest = {other: can for other, can in CAPABILITIES.items() if other is not backend}
        with pytest.raises(LookupError, match=f"without an entry: {backend}$"):
            complete(rest)


@pytest.mark.parametrize("backend", Backend)
def test_what_a_backend_can_do_is_consistent(backend: Backend):
    can = CAPABILITIES[backend]
    assert can.creates_nodes or not can.chooses_machines, "who creates no node chooses no machine"
    assert not (can.runs_beside_worker and can.uploads_workdir), "what is there needs no upload"
    assert can.creates_nodes or can.ends_by_agents, "what the backend does not end, agents do"
