"""Tests that tokens and variables are in no text that is made of the values which hold them."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from perdure.agent.config import CONFIG_VARIABLE, AgentConfig, ConfigError
from perdure.contract import DesiredNode, LeaseRequest, NodeCredentials, NodeRequest, NodeView
from perdure.spec.job import JobSpec
from perdure.workflows.policy.state.node import NodeState
from perdure_launcher.config import ConfigError as LauncherConfigError
from perdure_launcher.config import parse_config

TOKEN = "hunter2"
NODE = NodeCredentials(uid="0" * 8, role="worker", rank=0, incarnation=1, token=TOKEN)
SPEC = {"name": "a", "env": {"HF_TOKEN": TOKEN}, "roles": {"worker": {"nodes": 1, "command": ["true"]}}}
REQUEST = {
    "node": NODE.model_dump(),
    "name": "a-worker-0",
    "task_queue": "node",
    "spec": SPEC,
    "job_id": "job",
    "job_first_run_id": "run",
    "group_id": "group",
}


@pytest.mark.parametrize(
    "value",
    [
        NODE,
        JobSpec.model_validate(SPEC),
        NodeRequest.model_validate(REQUEST),
        DesiredNode(incarnation=1, token=TOKEN),
        NodeView(rank=0, incarnation=1, since=datetime.now(UTC), token=TOKEN),
        NodeState(rank=0, incarnation=1, token=TOKEN, since=datetime.now(UTC)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_text_of_a_value_has_no_secret_and_its_message_does(
    value: BaseModel, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("test").error("%s %r", value, [value])
    shown = f"{value} {value!r} {[value]} {caplog.text}"
    assert type(value).__name__ in shown
    assert TOKEN not in shown
    assert TOKEN in value.model_dump_json(), "what is sent is unchanged"
    assert type(value).model_validate_json(value.model_dump_json()) == value


def test_an_error_about_a_message_has_no_secret() -> None:
    wrong: dict[str, Any] = {**LeaseRequest.model_construct(node=NODE).model_dump(), "epoch": "no number"}  # pyrefly: ignore[missing-argument]
    for model, content in (
        (NodeRequest, {**REQUEST, "task_queue": None}),
        (NodeRequest, {**REQUEST, "node": {"token": TOKEN}}),
        (LeaseRequest, wrong),
        (NodeCredentials, {"token": [TOKEN]}),
    ):
        with pytest.raises(ValidationError) as refused:
            model.model_validate(content)
        assert TOKEN not in str(refused.value)
        assert TOKEN not in repr(refused.value)


def test_an_error_about_a_configuration_has_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "agent.json"
    path.write_text(json.dumps({"node": {**NODE.model_dump(), "rank": TOKEN, "uid": [TOKEN]}}))
    monkeypatch.setenv(CONFIG_VARIABLE, str(path))
    with pytest.raises(ConfigError, match="is not an agent configuration") as agents:
        AgentConfig.load()
    fields: dict[str, Any] = {"command": ["true"], "run_id": "0" * 8, "env": {"HF_TOKEN": TOKEN, "N": 1}}
    with pytest.raises(LauncherConfigError, match="env") as launchers:
        parse_config(fields, run_directory=tmp_path)
    assert TOKEN not in f"{agents.value} {agents.value!r} {launchers.value}"
    fields["env"].pop("N")
    assert TOKEN not in repr(parse_config(fields, run_directory=tmp_path))
