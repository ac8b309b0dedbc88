"""Waiting that a request to cancel the workflow does not end.

Groups, datasets and stores end with their job. An operator's batch, such as one that cancels all workflows of a prefix,
also reaches them, and what they hold must not be lost while their job still runs or winds down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from temporalio import workflow

ResultT = TypeVar("ResultT")


async def uncancelled(work: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Awaits the work in the workflow's main task, and again where a request to cancel the workflow has ended it."""
    while True:
        try:
            return await work()
        except asyncio.CancelledError:
            workflow.logger.warning("a request to cancel this workflow is ignored: it ends with its job")
