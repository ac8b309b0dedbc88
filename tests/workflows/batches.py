"""The transitions of a group without its workflow: they are delivered to a function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio import workflow

from perdure.contract import GroupTransitions
from perdure.workflows import transitions as transitions_module
from perdure.workflows.delivery import Delivery
from perdure.workflows.node_record import TransitionsCarried
from perdure.workflows.transitions import TransitionBatch

_NOW = datetime(2026, 1, 1, tzinfo=UTC)


def batch(carried: TransitionsCarried | None = None) -> TransitionBatch:
    return TransitionBatch(
        job_id="job/ns/name",
        uid="1",
        role="worker",
        group=0,
        gather=timedelta(0),
        carried=carried or TransitionsCarried(ownership_epoch="t"),
    )


def run(transitions: TransitionBatch, take: Callable[[GroupTransitions], Delivery]) -> None:
    """Delivers until the group's end is reported."""

    async def deliver(job_id: str, signal: str, message: GroupTransitions, **_: Any) -> Delivery:
        return take(message)

    async def until(condition: Callable[[], bool], **_: Any) -> None: ...

    async def go() -> None:
        async with asyncio.timeout(60):
            await transitions.deliver()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workflow, "now", lambda: _NOW)
        patch.setattr(workflow, "info", lambda: SimpleNamespace(run_id="r", get_current_history_length=lambda: 1))
        patch.setattr(workflow, "patched", lambda _: True)
        patch.setattr(workflow, "wait_condition", until)
        patch.setattr(transitions_module, "deliver", deliver)
        asyncio.run(go())
