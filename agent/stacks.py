"""Asks the launcher where the ranks are, for a user or a decision.

The launcher sees the ranks' processes, which the agent may not: in a pod they live in another container. So the request
is part of the launcher's desired state, and the answer is a report.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict

from perdure.agent.node import Node
from perdure.contract.base import size_in_json
from perdure.contract.stacks import CollectiveCall, NodeStacks, RankPosition, StackFrame, ThreadStack
from perdure_training.node_api.bodies import RankStacks, StacksReport

ANSWER_WITHIN = 6.0
"""Seconds: the launcher waits 2 s for the ranks."""
_MOST_TEXT = 256 * 1024
"""Bytes of all stacks of one answer; beyond that only main threads are kept, and of them the innermost calls. Temporal
takes no payload of 2 MB."""
_MOST_FRAMES = 32
_LONGEST_NAME = 200
"""Characters of a function's or a file's name where only these are kept."""
_MOST_RANKS = 64
_MOST_GROUPS = 8
_OWN_THREAD = "/perdure_launcher/rank_plugins/collectives.py"
_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d{1,9}) in (?P<function>.*)$')


class StacksUnknown(Exception):
    """The launcher has not answered; the message says so to users."""


class StackReader:
    """Reads the stacks of the node's ranks; readers that come meanwhile get the same answer."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._report: StacksReport | None = None
        self._reading: dict[bool, asyncio.Task[NodeStacks]] = {}

    async def read(self, *, by_signal: bool = True) -> NodeStacks:
        """Returns where the ranks are; without a signal to them, only what the kernel says of them.

        Raises:
            StacksUnknown: if the launcher does not answer in time.
        """
        reading = self._reading.get(by_signal)
        if reading is None or reading.done():
            reading = self._reading[by_signal] = asyncio.create_task(self._read(by_signal=by_signal))
        return await asyncio.shield(reading)

    def on_report(self, report: StacksReport) -> None:
        """Takes the launcher's answer."""
        self._report = report
        self._node.changed.fire()

    async def _read(self, *, by_signal: bool) -> NodeStacks:
        request = self._node.request_stacks(by_signal=by_signal)
        answered = await self._node.changed.wait_for(
            lambda: self._report is not None and self._report.request == request, within=ANSWER_WITHIN
        )
        if not answered or self._report is None:
            raise StacksUnknown(f"the launcher of the node has not answered within {ANSWER_WITHIN:g} s")
        report, self._report = self._report, None
        return stacks_of(self._node.config.node.rank, report)


def stacks_of(node: int, report: StacksReport) -> NodeStacks:
    """Reads the launcher's report. Training code can write all of it: what is no frame is left out."""
    ranks = report.ranks[:_MOST_RANKS]
    everything = sum(size_in_json(rank.text) for rank in ranks) <= _MOST_TEXT
    return NodeStacks(node=node, ranks=tuple(_position(rank, everything=everything) for rank in ranks))


def _position(rank: RankStacks, *, everything: bool) -> RankPosition:
    threads = tuple(_thread(text) for text in rank.text.split("\n\n"))
    known = tuple(thread for thread in threads if thread.frames and not _is_own(thread))
    return RankPosition(
        rank=rank.global_rank,
        pid=rank.pid,
        generation=rank.generation,
        state=rank.state[:1],
        cpu_percent=rank.cpu_percent,
        cpu_seconds=rank.cpu_seconds,
        switches=rank.switches,
        transferred_bytes=rank.transferred_bytes,
        threads=known if everything else tuple(_shortened(thread) for thread in known[:1]),
        collectives=tuple(CollectiveCall.model_validate(asdict(one)) for one in rank.collectives[:_MOST_GROUPS]),
        problem=rank.problem or ("" if known else "its answer holds no stack"),
    )


def _shortened(thread: ThreadStack) -> ThreadStack:
    """The innermost calls of a thread. Files keep their ends, by which users know them."""
    return thread.replace(
        frames=tuple(
            frame.replace(function=frame.function[:_LONGEST_NAME], file=frame.file[-_LONGEST_NAME:])
            for frame in thread.frames[:_MOST_FRAMES]
        )
    )


def _is_own(thread: ThreadStack) -> bool:
    """Whether it is the thread of Perdure that tells the rank's collectives."""
    return any(frame.file.endswith(_OWN_THREAD) for frame in thread.frames)


def _thread(text: str) -> ThreadStack:
    found = (_FRAME.match(line) for line in text.splitlines())
    return ThreadStack(
        frames=tuple(
            StackFrame(function=match["function"], file=match["file"], line=int(match["line"]))
            for match in found
            if match
        )
    )
