"""Interprets the end of a node's processes, and writes the job's report of it: pure functions of what is known."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path

from perdure.agent.log_patterns import matches_in
from perdure.agent.outbox import envelope
from perdure.agent.output_errors import command_error, explained
from perdure.agent.printed_lines import printed_lines
from perdure.agent.protocol import time_of, time_or_arrival
from perdure.agent.state import AgentState
from perdure.contract.agents import UNKNOWN_RANK, Failure, FailureKind, PrintedLines, Progress, RankExit, RuleMatch
from perdure.contract.identity import NodeCredentials
from perdure.contract.nodes import MOST_RANKS
from perdure.spec.durations import format_duration
from perdure.workflows.policy.diagnosis import claims
from perdure_training.node_api.bodies import CommandExit, ReadyReport, UnmanagedReport
from perdure_training.secret_texts import without_secrets

_CANNOT_START = (126, 127)
"""Exit codes of commands that cannot be started: another start would fail in the same way."""

LOG_TAIL_MAX = 4_000
"""Characters of a command's output that a report carries."""

OUTPUT_MAX = 256 * 1024
"""Bytes of the output in which errors are looked for: each rank of a node that NCCL aborts prints a long C++ stack."""


class Meaning(Enum):
    """The meaning of a command's end for the job."""

    NODE_ENDED = "the node is ended from outside, and its command with it"
    RANKS_FINISHED = "all ranks have ended with 0: without torchrun they are the command"
    COMMAND_FINISHED = "the command has nothing more to do"
    FAILED = "the command failed, or left although its ranks had not finished"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is known when a failure is found."""

    node: NodeCredentials
    state: AgentState
    progress: Progress | None
    output: str
    """The end of the command's output since its last ranks ended: the last lines of a world are not those of the next.
    An exit by `sys.exit("…")` leaves its text nowhere else."""

    run_dir: Path
    log_patterns: Mapping[int, str] = field(default_factory=dict[int, str])
    """The patterns of the job's rules, by the number of the rule."""
    is_alone: bool = True
    """The job has one node, so there is no other output."""

    @property
    def log_tail(self) -> str:
        """The part of the output that a report carries."""
        return self.output[-LOG_TAIL_MAX:]

    def trained_in(self, generation: int) -> bool:
        """Whether ranks of this node have made a step in that generation."""
        progress = self.progress
        return progress is not None and progress.generation == generation and progress.generation_steps > 0

    def matches(self, ranks: Sequence[RankExit] = (), *, tail: str = "") -> tuple[RuleMatch, ...]:
        """The rules whose pattern fits the output, whose end a report may know, or the error of a rank."""
        errors = (text for rank in ranks for text in (rank.traceback, rank.error) if text)
        return matches_in("\n".join((self.output, tail, *errors)), self.log_patterns)

    def printed(self, generation: int, failed_at: datetime | None) -> PrintedLines | None:
        """What a report tells of the output; the time is now where it is not known."""
        if self.is_alone:
            return None
        failed_at = failed_at or datetime.now(UTC)
        return printed_lines(self.run_dir, self.output, generation=generation, failed_at=failed_at)


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


def ranks_failure(scene: Scene, body: ReadyReport) -> Failure:
    """Returns the failure of the ranks that ended a node's last world."""
    ranks, wrong = _own_exits(scene.state, body.ranks)
    ranks = explained(ranks, scene.output, trained=scene.trained_in(body.after_generation))
    return Failure(
        **envelope(scene.node, earliest(body)),
        generation=body.after_generation,
        kind=FailureKind.RANKS,
        ranks=ranks,
        message=_rank_message(ranks),
        log_tail=scene.log_tail,
        matches=scene.matches(ranks),
        printed=scene.printed(body.after_generation, earliest(body)),
        progress=scene.progress,
        store_ports=body.store_ports,
        out_of_memory=body.out_of_memory,
        memory_limit=body.memory_limit,
        wrong_claims=wrong,
    )


def command_failure(scene: Scene, body: CommandExit, generation: int, *, starts_again: bool) -> Failure:
    """Returns the failure of a command in this generation, or before it entered it."""
    ranks, wrong = _own_exits(scene.state, body.ranks)
    output = body.log_tail or scene.output
    trained = scene.trained_in(generation)
    ranks = explained(ranks, output, trained=trained)
    failed = body.exit_code and not ranks
    return Failure(
        **envelope(scene.node, time_or_arrival(body.time)),
        generation=generation,
        kind=FailureKind.COMMAND,
        ranks=ranks,
        wrong_claims=wrong,
        exit_code=body.exit_code,
        signal=body.signal,
        starts_again=starts_again,
        message=_command_message(scene.state, body, generation),
        error=command_error(output, body.exit_code, trained=trained) if failed else None,
        log_tail=body.log_tail[-LOG_TAIL_MAX:],
        matches=scene.matches(ranks, tail=body.log_tail),
        printed=scene.printed(generation, time_or_arrival(body.time)),
        progress=scene.progress,
        store_ports=scene.state.store_ports,
        out_of_memory=body.out_of_memory,
        memory_limit=body.memory_limit,
    )


def node_failure(scene: Scene, generation: int, time: datetime | None) -> Failure:
    """Returns the loss of a node that is ended from outside."""
    return Failure(
        **envelope(scene.node, time),
        generation=generation,
        kind=FailureKind.NODE,
        message=f"node {scene.node.rank} lost: {scene.state.ended_by}",
        log_tail=scene.log_tail,
        progress=scene.progress,
    )


def unmanaged_failure(scene: Scene, body: UnmanagedReport) -> Failure:
    """Returns the failure of ranks that train outside of the job's world."""
    state = scene.state
    return Failure(
        **envelope(scene.node),
        generation=state.generation,
        kind=FailureKind.UNPROTECTED,
        ranks=tuple(RankExit(local_rank=index, pid=pid) for index, pid in enumerate(body.ranks)),
        message=body.detail or "ranks started without having requested a rendezvous",
        store_ports=state.store_ports,
    )


def overdue_failure(scene: Scene, *, patience: timedelta) -> Failure:
    """Returns the failure of a command that runs but has not entered the newest world within `patience`."""
    state = scene.state
    return Failure(
        **envelope(scene.node),
        generation=state.generation,
        kind=FailureKind.RENDEZVOUS,
        message=f"the command did not enter generation {state.generation} within {format_duration(patience)}: "
        f"{_last_seen(state)}",
        log_tail=scene.log_tail,
        matches=scene.matches(),
        progress=scene.progress,
        store_ports=state.store_ports,
    )


def hide_secrets(failure: Failure) -> Failure:
    """Returns the failure as people may read it: its texts quote the command, as argparse's errors do."""
    printed = failure.printed
    if printed is not None:
        rare = tuple(line.replace(text=without_secrets(line.text)) for line in printed.rare)
        printed = printed.replace(rare=rare)
    ranks = (replace(rank, error=_hidden(rank.error), traceback=_hidden(rank.traceback)) for rank in failure.ranks)
    return failure.replace(
        ranks=tuple(ranks),
        message=without_secrets(failure.message),
        error=_hidden(failure.error),
        log_tail=without_secrets(failure.log_tail),
        printed=printed,
    )


def _hidden(text: str | None) -> str | None:
    return None if text is None else without_secrets(text)


def earliest(body: ReadyReport) -> datetime | None:
    """Returns the time of the first exit of a rank, as far as times are known."""
    return min((time for rank in body.ranks if (time := time_of(rank.time))), default=None)


def _command_message(state: AgentState, body: CommandExit, generation: int) -> str:
    """Returns one line for users about a failed command."""
    message = body.message or _end_message("the command", body.exit_code, body.signal)
    if not _was_in(state, body, generation):
        return f"{message} before it entered generation {generation}"
    if body.exit_code == 0:
        return f"{message} although its ranks had not finished generation {generation}"
    return message


def _last_seen(state: AgentState) -> str:
    """Returns the last known state of a command that has not entered the newest world, for users."""
    if state.ready_after is not None:
        return "its rendezvous handler was ready, but did not accept it"
    if state.entered:
        return f"it was in generation {state.entered} last"
    return "it has not reached the rendezvous"


def _was_in(state: AgentState, body: CommandExit, generation: int) -> bool:
    return max(body.generation, state.entered) >= generation


def _own_exits(state: AgentState, reported: tuple[RankExit, ...]) -> tuple[tuple[RankExit, ...], int]:
    """The exits of the node's own ranks, each with its time only if that is possible, and the number of claims about
    others."""
    firsts: set[int] = set()
    # An agent that has lost its state does not know where its ranks are.
    if state.entered_base_rank is not None and state.world is not None:
        firsts = {state.entered_base_rank, state.world.base_rank}
    exits = [replace(rank, time=rank.time if time_of(rank.time) else None) for rank in reported]
    return claims.own_exits(exits, first_ranks=firsts, processes=state.processes or MOST_RANKS)


def _rank_message(ranks: tuple[RankExit, ...]) -> str:
    """Returns one line for users about ranks that ended together."""
    # A rank that was ended by a signal did not fail because of the others.
    first = min(ranks, key=lambda rank: (rank.signal is None, rank.time or math.inf))
    name = f"rank {first.local_rank if first.global_rank is None else first.global_rank}"
    name = name if first.local_rank != UNKNOWN_RANK else "an unknown rank"
    message = f"{name}: {first.error}" if first.error else _end_message(name, first.exit_code, first.signal)
    return message if len(ranks) == 1 else f"{message} (and {len(ranks) - 1} more)"


def _end_message(who: str, exit_code: int | None, number: int | None) -> str:
    if number is None:
        return f"{who} exited with {exit_code}"
    try:
        return f"{who} was ended by {signal.Signals(number).name}"
    except ValueError:
        return f"{who} was ended by signal {number}"
