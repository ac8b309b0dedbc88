"""Follows the actors of one group and yields each event once.

An actor ends in the middle of a call that the bridge holds, so its end is known at once, in Ray's words. A cluster that
does not answer says nothing about nodes.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from perdure.activities.nodes.backend import NodeRefused
from perdure.activities.nodes.ray.connection import RayConnection, RayUnavailable
from perdure.activities.nodes.ray.naming import names_of
from perdure.activities.nodes.ray.placement import prefix_of
from perdure.contract import LossCause, NodeEvent, NodeEventKind, WatchRequest
from perdure.contract.names import group_index, job_of

logger = logging.getLogger(__name__)

_LOOK: Final = 1.0
"""Seconds until actors that another worker created are found; changes of known ones are reported at once."""
_PAUSE: Final = 2.0
_LONGEST: Final = 300
_KINDS: Final = {"pending": NodeEventKind.PENDING, "running": NodeEventKind.RUNNING, "gone": NodeEventKind.GONE}


def event_of(pattern: str, name: str, facts: Mapping[str, Any]) -> NodeEvent:
    """Returns the event that the state of an actor implies.

    Args:
        pattern: of the names of its role.
        name: of the actor.
        facts: as the bridge knows them.
    """
    match = re.fullmatch(pattern, name)
    assert match is not None
    kind = _KINDS[facts["state"]]
    gone, pending = kind is NodeEventKind.GONE, kind is NodeEventKind.PENDING
    reason = str(facts.get("reason", "")) if gone or pending else ""
    return NodeEvent(
        kind=kind,
        rank=int(match[1]),
        incarnation=int(match[2]),
        time=datetime.now(UTC),
        reason=reason[:_LONGEST],
        queued=pending and "placement group is" in reason,
        host=str(facts.get("host", "")) if gone else "",
        cause=LossCause(facts.get("cause", "UNKNOWN")) if gone else LossCause.UNKNOWN,
        refused=gone and bool(facts.get("refused")),
    )


class GroupWatch:
    """Watches a group's actors."""

    def __init__(self, ray: RayConnection, request: WatchRequest) -> None:
        self._ray = ray
        self._request = request
        self._pattern = names_of(job_of(request.job_id)[1], [request.role], request.uid)
        self._expected = {(node.rank, node.incarnation) for node in request.known}
        self._reported: dict[tuple[int, int], NodeEvent] = {}
        self._leaving: set[str] = set()

    async def batches(self) -> AsyncGenerator[tuple[NodeEvent, ...]]:
        """Yields the current state of all nodes, then every change, until it is closed."""
        timeout = 0.0
        while True:
            prefix = prefix_of(self._request.uid)
            try:
                found = await self._ray.call("look", pattern=self._pattern, prefix=prefix, timeout=timeout)
                await self._leave_drained(found)
            except (RayUnavailable, NodeRefused) as error:
                logger.info("the nodes of %s cannot be watched now: %s", self._request.group_id, error)
                await asyncio.sleep(_PAUSE)
                continue
            timeout = _LOOK
            if batch := tuple(self._news(found)):
                yield batch

    def _news(self, found: Mapping[str, Mapping[str, Any]]) -> Iterator[NodeEvent]:
        present: set[tuple[int, int]] = set()
        for name, facts in found.items():
            event = event_of(self._pattern, name, facts)
            if group_index(event.rank) != self._request.group:
                continue
            key = (event.rank, event.incarnation)
            present.add(key)
            reported = self._reported.get(key)
            if reported is None or (reported.kind, reported.reason) != (event.kind, event.reason):
                self._reported[key] = event
                yield event
        known = {key for key, event in self._reported.items() if event.kind is not NodeEventKind.GONE}
        for rank, incarnation in sorted((self._expected | known) - present):
            event = NodeEvent(
                kind=NodeEventKind.GONE,
                rank=rank,
                incarnation=incarnation,
                time=datetime.now(UTC),
                reason="its actor is gone",
            )
            self._reported[rank, incarnation] = event
            yield event
        self._expected.clear()

    async def _leave_drained(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """Has nodes leave machines that Ray drains, before Ray ends them."""
        for name, facts in found.items():
            if facts["state"] == "running" and (drained := facts.get("drained")) and name not in self._leaving:
                logger.info("%s leaves: %s", name, drained)
                await self._ray.call("leave", name=name, reason=drained)
                self._leaving.add(name)
