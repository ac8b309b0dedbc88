"""Has the launcher measure the node's machine, for a user or before the node is taken into a world, and adds what only
the agent can see: its clock beside the server's, and whether other nodes answer it.

Whatever happens there is an answer: what could not be measured is a check that has failed, with its reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from datetime import UTC, datetime

from perdure.agent.connection import why_cut_off
from perdure.agent.machine_history import MachineHistory
from perdure.agent.node import Node
from perdure.agent.replays import replay
from perdure.contract.checks import MOST_CHECKS, Check, CheckKind, CheckNode, NodeChecks, Peer
from perdure.spec.preflight import Preflight
from perdure_training.node_api.bodies import CheckRequest, ChecksReport

ANSWER_WITHIN = {CheckKind.QUICK: 25.0, CheckKind.FULL: 85.0, CheckKind.LINK: 70.0}
"""Seconds: the launcher gives each of its checks 5 s, and those with torch a minute."""


class Checker:
    """Measures the node's machine, for one caller at a time."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._history = MachineHistory(node.config.machine_dir)
        self._report: ChecksReport | None = None
        self._turn = asyncio.Lock()
        self._clock: Check | None = None

    def on_report(self, report: ChecksReport) -> None:
        """Takes the launcher's answer."""
        self._report = report
        self._node.changed.fire()

    def on_time(self, handed_out: datetime) -> None:
        """Compares the clock with the server's, by the time when it handed out an activity that begins now: the least
        difference counts, since an activity may begin late."""
        self._clock = min((one for one in (self._clock, _clock(handed_out)) if one is not None), key=_difference)

    async def make_checks(self) -> None:
        """Makes the checks that the job desires, once the launcher runs: before the node is taken into a world, where
        there are some, and after a failure that may be the machine's."""
        node, preflight = self._node, self._node.config.preflight

        def is_due() -> bool:
            # Nothing is checked before the first world of a job without `preflight`.
            desired = node.state.check_runs if preflight is not Preflight.OFF or node.state.check_runs > 1 else 0
            return bool(node.state.mode) and node.state.checked < desired

        while True:
            await node.changed.wait_for(is_due)
            run = node.state.checked + 1
            # Ranks of a world are about to use the devices.
            kind = "quick" if preflight is Preflight.OFF or node.state.world is not None else preflight.value
            measured = await self.measure(CheckRequest(kind=kind))
            found = await asyncio.to_thread(self._history.take, measured)
            node.on_checked(run, (*found, *([self._clock] if self._clock is not None else [])))

    async def answer(self, question: CheckNode, *, handed_out: datetime) -> NodeChecks:
        """Answers a user.

        Args:
            question: The checks.
            handed_out: The server's time when it handed the question out, a moment ago.
        """
        if question.kind is CheckKind.REPLAY:
            return self._answer(await replay(self._node, question.request))
        clock = _clock(handed_out)
        link = question.link
        request = CheckRequest(kind=question.kind.lower())
        if link is not None:
            request = CheckRequest(kind="link", address=link.address, port=link.port, rank=link.end)
        found = await self.measure(request)
        if link is None:
            found = (*found, clock, *await asyncio.gather(*map(_reach, question.peers)))
        return self._answer(found)

    def _answer(self, found: tuple[Check, ...]) -> NodeChecks:
        config = self._node.config
        return NodeChecks(node=config.node.rank, host=config.host, checks=found[:MOST_CHECKS])

    async def measure(self, request: CheckRequest) -> tuple[Check, ...]:
        """Returns what the launcher measures."""
        async with self._turn:
            return await self._measure(request)

    async def _measure(self, request: CheckRequest) -> tuple[Check, ...]:
        patience = ANSWER_WITHIN.get(CheckKind(request.kind.upper()), ANSWER_WITHIN[CheckKind.QUICK])
        number = self._node.request_checks(request)
        begun = time.monotonic()
        answered = await self._node.changed.wait_for(
            lambda: self._report is not None and self._report.request == number, within=patience
        )
        report, self._report = self._report, None
        if not answered or report is None:
            problem = f"the launcher of the node has not answered within {patience:g} s"
            return (Check(name="launcher", problem=problem, seconds=round(time.monotonic() - begun, 3)),)
        return tuple(_checks(report))


def _checks(report: ChecksReport) -> Iterable[Check]:
    for figure in report.figures:
        yield Check(
            name=figure.name,
            subject=figure.subject,
            value=figure.value,
            unit=figure.unit,
            problem=figure.problem,
            seconds=figure.seconds,
        )


def _clock(handed_out: datetime) -> Check:
    return Check(name="clock", value=(datetime.now(UTC) - handed_out).total_seconds(), unit="s")


def _difference(clock: Check) -> float:
    return abs(clock.value or 0.0)


async def _reach(peer: Peer) -> Check:
    begun = time.monotonic()
    problem = await why_cut_off(peer.address, peer.port)
    seconds = round(time.monotonic() - begun, 3)
    value = None if problem else seconds
    return Check(name="reach", subject=f"node {peer.rank}", value=value, unit="s", problem=problem, seconds=seconds)
