"""Agents of local nodes, forked from an interpreter that has imported them.

A local node's agent imports for more than a second of processor time, which is most of what a short job costs. A forked
agent is as real, but the process table shows the command and the environment of the interpreter: tests that look for
an agent there, and tests of how a node's processes are started, have cold ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from perdure.activities.nodes.local import launch
from perdure.activities.nodes.local.folders import FolderOwner, NodeFolder
from perdure.activities.nodes.local.spawn import boot_id, started_ticks
from tests.support.waiting import DEADLINE
from tests.support.warm_process import WarmProcess, warm_interpreter

AGENT_MODULES = ("perdure.agent.process", "perdure.agent.transport")
"""What an agent imports."""


WARM = "warm-"
"""The names of jobs whose agents the worker of the shared control plane forks begin with it."""


def warm_name() -> str:
    """Returns the name of another such job."""
    return f"{WARM}{secrets.token_hex(4)}"


class _Started:
    """The starter of an agent that runs, as `launch.finish` takes it."""

    returncode = 0

    def communicate(self, timeout: float) -> tuple[bytes, bytes]:
        return b"", b""


@contextlib.contextmanager
def warm_agents(prefix: str = "") -> Iterator[None]:
    """Has this process's local backends fork agents; ends those that are left.

    Args:
        prefix: of the names of the jobs whose agents are forked.
    """
    agents: list[WarmProcess] = []
    start_cold_agent = launch.start_agent

    def start_agent(folder: NodeFolder, record: FolderOwner, connection: Mapping[str, str]) -> Any:
        if not record.job_id.rpartition("/")[2].startswith(prefix):
            return start_cold_agent(folder, record, connection)
        output = os.open(folder.path / "agent.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            agent = warm_interpreter(*AGENT_MODULES).start(
                "perdure.agent",
                environment=launch.agent_environment(folder, record, connection),
                folder=folder.path,
                output=output,
                errors=output,
            )
        finally:
            os.close(output)
        agents.append(agent)
        identity = {"pid": agent.pid, "started": started_ticks(agent.pid), "boot": boot_id(), "time": time.time()}
        folder.agent_file.write_text(json.dumps(identity))
        return _Started()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "start_agent", start_agent)
        try:
            yield
        finally:
            for agent in agents:
                agent.kill()
            for agent in agents:
                agent.ends_within(DEADLINE)
