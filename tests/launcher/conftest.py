"""Fixtures of the launcher's tests."""

from __future__ import annotations

import pytest

from perdure_launcher.probes import stacks
from tests.support.waiting import DEADLINE


@pytest.fixture
def patient_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that answer with their stacks are waited for, however busy the machine is."""
    monkeypatch.setattr(stacks, "ANSWER_WITHIN", DEADLINE)
