"""Tests of what a process learns of the other roles of its job, from the file that its agent replaces."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure_training import roles
from perdure_training.node_api.layout import PROGRESS
from perdure_training.node_api.layout import ROLES as FILE
from perdure_training.node_api.rank_environment import PROGRESS_VARIABLE, ROLES_VARIABLE
from perdure_training.node_api.untrusted_files import replace_beneath

SERVES: dict[str, Any] = {"addresses": ["a:1", "b:2"], "generation": 1, "processes": 2, "ready": True}


@pytest.fixture
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(PROGRESS_VARIABLE, str(tmp_path / PROGRESS))
    monkeypatch.delenv(ROLES_VARIABLE, raising=False)
    return tmp_path


def tell(run_directory: Path, **known: dict[str, Any]) -> None:
    replace_beneath(run_directory, FILE, json.dumps(known).encode())


def test_the_file_of_the_agent_is_newer_than_the_environment(run_directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ROLES_VARIABLE, json.dumps({"ps": {"addresses": ["old:1"]}}))
    assert roles.addresses("ps") == ("old:1",)
    tell(run_directory, ps=SERVES | {"of": "a newer release"})
    assert roles.addresses("ps") == ("a:1", "b:2")
    assert roles.known() == {
        "ps": roles.Role(name="ps", addresses=("a:1", "b:2"), generation=1, processes=2, ready=True)
    }


def test_a_job_of_one_role_knows_no_others(run_directory: Path):
    assert roles.known() == {}
    with pytest.raises(KeyError, match="role ps: this job has no other roles"):
        roles.wait_for("ps")


def test_waiting_for_a_role_ends_when_it_is_ready_or_has_completed_or_in_time(run_directory: Path):
    tell(run_directory, ps=SERVES | {"ready": False}, data={"completed": True})
    assert roles.wait_for("data").completed
    with pytest.raises(roles.RoleTimeout, match=r"role ps is not ready after 0:00:00\.1"):
        roles.wait_for("ps", timeout=timedelta(seconds=0.1))
    threading.Timer(0.3, tell, (run_directory,), {"ps": SERVES}).start()
    assert roles.wait_for("ps", timeout=timedelta(seconds=60)).ready


def test_watching_yields_what_is_known_and_each_change(run_directory: Path):
    tell(run_directory, ps=SERVES)
    changes = roles.watch()
    assert next(changes)["ps"].generation == 1
    threading.Timer(0.3, tell, (run_directory,), {"ps": SERVES | {"generation": 2}}).start()
    assert next(changes)["ps"].generation == 2
