"""Notifies a test of each task of a workflow that a worker of its process has run.

Between two tasks a query has the same answer, and each query costs the server and the worker more time than most tasks
do: a test that waits for a state asks after each task, not after each pause.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from typing import Any

from temporalio.worker import WorkflowInstance, WorkflowInstanceDetails, WorkflowRunner

_BURST = 0.05
"""Seconds after a task in which others often follow it: they share one query."""

_UNOBSERVED_PAUSE = 0.1
"""Seconds between two queries of a workflow that another process runs."""

_LONGEST_WAIT = 2.0
"""Seconds: an answer may depend on the time, and a workflow may be terminated without a task."""

_lock = threading.Lock()
_tasks: Counter[str] = Counter()
"""The number of tasks by workflow ID."""
_waiting: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)


def count(workflow_id: str) -> int:
    """Returns how many tasks of the workflow workers of this process have run."""
    return _tasks[workflow_id]


async def wait_for_task_after(workflow_id: str, known: int) -> None:
    """Returns when more tasks have run, or when it is time to ask nevertheless."""
    waiter = asyncio.get_running_loop().create_future()
    with _lock:
        if _tasks[workflow_id] == known:
            _waiting[workflow_id].add(waiter)
        else:
            waiter.set_result(None)
    try:
        await asyncio.wait([waiter], timeout=_LONGEST_WAIT if known else _UNOBSERVED_PAUSE)
        await asyncio.sleep(_BURST)
    finally:
        with _lock:
            _waiting[workflow_id].discard(waiter)


def _note_task(workflow_id: str) -> None:
    """Wakes tests that wait; workers call it in threads of their own."""
    with _lock:
        _tasks[workflow_id] += 1
        for waiter in _waiting.pop(workflow_id, ()):
            waiter.get_loop().call_soon_threadsafe(_wake, waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class ObservedRunner(WorkflowRunner):
    """Runs workflows as another runner does, and notes their tasks."""

    def __init__(self, runner: WorkflowRunner) -> None:
        self._runner = runner

    def prepare_workflow(self, defn: Any) -> None:
        self._runner.prepare_workflow(defn)

    def set_worker_level_failure_exception_types(self, types: Any) -> None:
        self._runner.set_worker_level_failure_exception_types(types)

    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        instance = self._runner.create_instance(det)
        activate = instance.activate

        def activate_and_note(act: Any) -> Any:
            completion = activate(act)
            # A replay, which a query may need too, shows the past.
            if not act.is_replaying:
                _note_task(det.info.workflow_id)
            return completion

        instance.activate = activate_and_note
        return instance
