"""Interprets the end of a node's processes: pure functions of the report and of the node's state."""

from __future__ import annotations

import signal
from datetime import UTC, datetime
from enum import Enum

from agent.protocol import time_of
from agent.state import AgentState
from perdure_launcher.protocol import CommandExit
from perdure_launcher.protocol import RankExit as ReportedExit
from workflows.messages import RankExit

_CANNOT_START = (126, 127)
"""Exit codes of commands that cannot be started: another start would fail in the same way."""

_TRACEBACK_MAX = 2_000


class Meaning(Enum):
    """The meaning of a command's end for the job."""

    NODE_ENDED = "the node is ended from outside, and its command with it"
    RANKS_FINISHED = "all ranks have ended with 0: without torchrun they are the command"
    COMMAND_FINISHED = "the command has nothing more to do"
    FAILED = "the command failed, or left although its ranks had not finished"


def is_news(state: AgentState, body: CommandExit) -> bool:
    """Returns whether the command was still desired when it ended, and whether no later start replaced it."""
    return state.leaving is None and state.run and body.attempt >= state.attempt


def starts_again(state: AgentState, body: CommandExit) -> bool:
    """Returns whether the command has to be restarted at once, for a newer world than it knew."""
    outdated = max(body.generation or state.entered, state.started_for) < state.generation
    return is_news(state, body) and (body.superseded or (outdated and body.exit_code not in _CANNOT_START))


def meaning(state: AgentState, body: CommandExit, generation: int) -> Meaning:
    """Returns the meaning of the command's end for this generation."""
    if state.ended_by:
        return Meaning.NODE_ENDED
    if body.exit_code != 0:
        return Meaning.FAILED
    if state.mode == "env" and _was_in(state, body, generation):
        return Meaning.RANKS_FINISHED
    finished = generation <= max(state.finished, state.complete)
    return Meaning.COMMAND_FINISHED if finished else Meaning.FAILED


def command_message(state: AgentState, body: CommandExit, generation: int) -> str:
    """Returns one line for users about a failed command."""
    message = body.message or _end_message("the command", body.exit_code, body.signal)
    if not _was_in(state, body, generation):
        return f"{message} before it entered generation {generation}"
    if body.exit_code == 0:
        return f"{message} although its ranks had not finished generation {generation}"
    return message


def last_seen(state: AgentState) -> str:
    """Returns the last known state of a command that has not entered the newest world, for users."""
    if state.ready_after is not None:
        return "its rendezvous handler was ready, but did not accept it"
    if state.entered:
        return f"it was in generation {state.entered} last"
    return "it has not reached the rendezvous"


def _was_in(state: AgentState, body: CommandExit, generation: int) -> bool:
    return max(body.generation, state.entered) >= generation


def rank_exits(reported: tuple[ReportedExit, ...]) -> tuple[RankExit, ...]:
    """The exits as the job gets them, with the last lines of their tracebacks."""
    return tuple(
        RankExit(
            local_rank=rank.local_rank,
            global_rank=rank.global_rank,
            pid=rank.pid,
            exit_code=rank.exit_code,
            signal=rank.signal,
            error=rank.error,
            traceback=rank.traceback[-_TRACEBACK_MAX:] if rank.traceback else None,
            time=time_of(rank.time),
        )
        for rank in reported
    )


def earliest(ranks: tuple[RankExit, ...]) -> datetime | None:
    """Returns the time of the first exit, as far as times are known."""
    return min((rank.time for rank in ranks if rank.time), default=None)


def rank_message(ranks: tuple[RankExit, ...]) -> str:
    """Returns one line for users about ranks that ended together."""
    # A rank that was ended by a signal did not fail because of the others.
    first = min(ranks, key=lambda rank: (rank.signal is None, rank.time or datetime.max.replace(tzinfo=UTC)))
    name = f"rank {first.local_rank if first.global_rank is None else first.global_rank}"
    message = f"{name}: {first.error}" if first.error else _end_message(name, first.exit_code, first.signal)
    return message if len(ranks) == 1 else f"{message} (and {len(ranks) - 1} more)"


def _end_message(who: str, exit_code: int | None, number: int | None) -> str:
    if number is None:
        return f"{who} exited with {exit_code}"
    try:
        return f"{who} was ended by {signal.Signals(number).name}"
    except ValueError:
        return f"{who} was ended by signal {number}"
