"""Tests that a message with other values is a whole message, and the one before stays as it was."""

from __future__ import annotations

from copy import copy
from datetime import UTC, datetime

from perdure.contract import Evidence, EvidenceSource
from perdure.workflows.policy.state.node import NodeState

SINCE = datetime(2026, 11, 26, tzinfo=UTC)


def test_replace_makes_what_model_copy_makes() -> None:
    node = NodeState(rank=3, incarnation=1, token="secret", since=SINCE, store_ports=(29_500,))
    changed = node.replace(stepping=4, reason="it steps")
    assert changed == node.model_copy(update={"stepping": 4, "reason": "it steps"})
    assert changed.model_dump_json() == node.model_copy(update={"stepping": 4, "reason": "it steps"}).model_dump_json()
    assert NodeState.model_validate_json(changed.model_dump_json()) == copy(changed) == changed
    assert (node.stepping, node.reason) == (0, "")


def test_a_changed_message_can_be_hashed_and_changed_again() -> None:
    evidence = Evidence(time=SINCE, source=EvidenceSource.AGENT, text="before").replace(text="after")
    assert hash(evidence) == hash(Evidence(time=SINCE, source=EvidenceSource.AGENT, text="after"))
    assert evidence.model_copy(update={"rank": 2}).replace(rank=3).rank == 3
