"""Asks the ranks of the node to replay their next step, for a user: see `perdure_training.replay`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from perdure.agent.node import Node
from perdure.contract.checks import Check
from perdure_training.node_api import layout
from perdure_training.node_api.corruption_file import GRADIENTS
from perdure_training.node_api.replay_files import ReplayAnswer, answer_path, read_answer, write_request

ANSWER_WITHIN = 80.0
"""Seconds: ranks look for requests every few seconds, at a step."""
_LOOK_EVERY = 0.2
_NAME = "replay"
_NO_REPLAY = "the script replays no steps: docs/corruption.md says how it can"


async def replay(node: Node, request: int, *, within: float = ANSWER_WITHIN) -> tuple[Check, ...]:
    """Returns what each rank of the node has found.

    Args:
        node: The node.
        request: The number of the replay.
        within: Seconds to wait for the ranks.
    """
    state = node.state
    world = state.world
    if world is None or world.generation != state.entered:
        return (Check(name=_NAME, problem="the node trains in no world now"),)
    ranks = range(world.base_rank, world.base_rank + (state.processes or 1))
    run_dir, generation = node.config.run_dir, world.generation
    try:
        write_request(run_dir, request, generation=generation)
    except OSError as error:
        return (Check(name=_NAME, problem=f"the ranks cannot be asked: {error.strerror or error}"),)
    until = time.monotonic() + within
    while True:
        paths = {rank: answer_path(run_dir / layout.PROGRESS, rank) for rank in ranks}
        answers = {rank: read_answer(path, generation=generation, beneath=run_dir) for rank, path in paths.items()}
        if not any(answers.values()):
            return (Check(name=_NAME, problem=_NO_REPLAY),)
        if time.monotonic() >= until or not _missing(answers, request):
            return tuple(_check(rank, answer, request, within) for rank, answer in answers.items())
        await asyncio.sleep(_LOOK_EVERY)


def _missing(answers: Mapping[int, ReplayAnswer | None], request: int) -> bool:
    """Whether a rank can answer that has not: one that cannot has said why."""
    return any(one is not None and one.request < request and not one.problem for one in answers.values())


def _check(rank: int, answer: ReplayAnswer | None, request: int, within: float) -> Check:
    if answer is None:
        return Check(name=_NAME, subject=f"rank {rank}", problem=_NO_REPLAY)
    if answer.request < request and not answer.problem:
        late = f"no step was replayed within {within:g} s: `perdure status` shows whether ranks step"
        return Check(name=_NAME, subject=f"rank {rank}", problem=late)
    what = "gradients" if answer.compared == GRADIENTS else "parameters"
    return Check(
        name=_NAME,
        subject=f"rank {rank}, {what} of step {answer.step:,}" if answer.compared else f"rank {rank}",
        checksum=answer.checksum,
        problem=answer.problem,
        seconds=round(answer.seconds, 3),
    )
