"""What a group tells its job, at moments that no server can be made to bring about."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from temporalio import workflow
from temporalio.exceptions import ApplicationError

from workflows.edges import EdgeBatch
from workflows.messages import GroupEdges
from workflows.node_record import EdgesCarried


class Job:
    """Takes messages, or is closed; another run of it adopts the group while a message is under way."""

    def __init__(self, adopts: Callable[[], None], *, closed: bool) -> None:
        self.told: list[GroupEdges] = []
        self._adopts = adopts
        self._closed = closed

    async def signal(self, name: str, message: GroupEdges) -> None:
        self.told.append(message)
        if len(self.told) == 1:
            self._adopts()
            if self._closed:
                raise ApplicationError("not found")


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("tenure", ["new", "old"])
async def test_a_job_that_adopts_a_group_while_it_says_goodbye_hears_that_it_is_gone(
    closed: bool, tenure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def until(condition: Callable[[], bool], **_: Any) -> None:
        assert condition()

    edges = EdgeBatch(
        job_id="job/ns/name", uid="1", group=0, gather=timedelta(seconds=1), carried=EdgesCarried(tenure="old")
    )
    job = Job(lambda: edges.adopted((), tenure=tenure), closed=closed)
    monkeypatch.setattr(workflow, "get_external_workflow_handle", lambda _: job)
    monkeypatch.setattr(workflow, "wait_condition", until)
    monkeypatch.setattr(workflow, "logger", logging.getLogger(__name__))
    edges.wound_down()
    async with asyncio.timeout(10):
        await edges.deliver()
    assert [(message.tenure, message.adopted, message.wound_down) for message in job.told] == [
        ("old", None, True),
        (tenure, (), True),
    ]
