"""Tests of reading an agent's state that another release has written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perdure.agent.state import AgentState, StateFile
from perdure_training.node_api.layout import AGENT_STATE


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"finished": "all of them"}, {"attempt": 3, "entered": 7}),
        ({"failures": {"a": 1}, "entered": None}, {"attempt": 3}),
        ({"field_of_the_next_release": 1}, {"attempt": 3, "entered": 7}),
    ],
)
def test_only_what_cannot_be_read_is_forgotten(tmp_path: Path, changes: dict[str, object], kept: dict[str, int]):
    file = StateFile(tmp_path)
    file.save(AgentState(attempt=3, entered=7))
    path = tmp_path / AGENT_STATE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert file.load() == AgentState.model_validate(kept)


def test_what_is_no_state_is_kept_aside(tmp_path: Path):
    for content in ("[1, 2", "[1, 2]", "7"):
        (tmp_path / AGENT_STATE).write_text(content)
        assert StateFile(tmp_path).load() == AgentState()
        assert (tmp_path / f"{AGENT_STATE}.rejected").read_text() == content
