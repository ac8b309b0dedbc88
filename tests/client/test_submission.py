"""Tests of how a job is started on the server."""

from __future__ import annotations

from typing import Any, cast

from temporalio.client import Client
from temporalio.common import TypedSearchAttributes

from perdure.client.submission import start_job
from perdure.spec.validate import parse_spec
from perdure.workflows.search_attributes import JOB_OWNER

LONGEST_KEYWORD = 255
"""Characters of a keyword that servers with PostgreSQL or MySQL write: they never list a workflow with a longer one."""

SPEC = parse_spec({"name": "llama", "roles": {"worker": {"nodes": 1, "command": ["train"]}}})


class RecordingServer:
    """Takes each job, and its search attributes."""

    def __init__(self) -> None:
        self.attributes = TypedSearchAttributes.empty

    async def start_workflow(self, *_: Any, search_attributes: TypedSearchAttributes, **how: Any) -> None:
        self.attributes = search_attributes


async def owner_of_a_job_of(owner: str) -> str:
    server = RecordingServer()
    await start_job(
        cast(Client, server), SPEC, "job/default/llama", task_queue="perdure", again=True, memo={}, owner=owner
    )
    return server.attributes[JOB_OWNER]


async def test_a_job_has_its_owner_as_the_cluster_names_them():
    assert await owner_of_a_job_of("https://id.example#alice") == "https://id.example#alice"


async def test_a_job_of_an_owner_with_a_very_long_name_can_be_listed():
    name = "https://id.example/" + "x" * 400
    owner = await owner_of_a_job_of(name)
    assert name.startswith(owner)
    assert len(owner) == LONGEST_KEYWORD
