"""Names in the run directory, the folder that the agent, the launcher, torchrun's handler and the ranks share.

docs/node-protocol.md says who writes and reads what.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

AGENT_SOCKET: Final = "agent.sock"
"""The socket with the longest path: other sockets are in folders that only their own processes enter."""

CHECKPOINT_SOCKET: Final = "saves.sock"
"""The socket through which ranks reach the storage for checkpoints; its name is not longer than the agent's."""
CHECKPOINT_DESIRED: Final = "checkpoint-desired.json"
CHECKPOINT_PROGRESS: Final = "checkpoint-progress.json"
"""The desired state of checkpoints, for the rank that announces them."""

REPLAY_REQUEST: Final = "replay-request.json"
"""The newest request of a user to replay a step, which the agent writes and the ranks read."""
ROLES: Final = "roles.json"
"""The addresses of all roles of the job, which the agent replaces when they change; missing for a job of one role."""

LOGS: Final = "logs"
OUTPUT_LOG: Final = "output.log"
"""The command's output, in `logs`; older parts have the suffixes `.1`, `.2`, …"""
LOG_TIMES: Final = "output.times"
"""When the bytes of `output.log` were printed; the older parts' have the same suffixes (see `log_times`)."""
ROTATED_LOGS: Final = 4
"""The number of older parts that are kept."""
AGENT_LOG: Final = "agent.log"
"""The agent's own log, in `logs`."""

PROGRESS: Final = "progress"
"""A folder with a file for each rank of the node."""

EVENTS: Final = "events"
"""A folder with event files: those of ranks, which the training library names, and those below."""
TORCHRUN_EVENTS: Final = "torchrun.jsonl"
"""Events of the node's torchruns, in `events`."""
AGENT_EVENTS: Final = "agent.jsonl"
"""Events of the agent, in a folder `events` of its own."""
AGENT_METRICS: Final = "metrics.jsonl"
"""Metrics of its machine, as events, beside them."""

STACKS: Final = "stacks"
"""A folder with a file for each rank that says where it is when the launcher asks, and a socket for each that tells its
collectives."""

ERRORS: Final = "errors"
"""A folder with error files of ranks."""
RANK_EXITS: Final = "rank-exits.json"
"""Exits of ranks that the agent does not have yet, in `errors`."""

RENDEZVOUS_STATE: Final = "rendezvous-state"
"""The state that torchruns of this node pass on to each other."""
TORCHRUN_LOCK: Final = "torchrun-lock"
"""The file that a torchrun locks for as long as it has this node's place in the world."""

INJECTED: Final = "inject"
"""The folder that PYTHONPATH begins with."""

WARM: Final = "warm"
"""The folder of warm starts, described in `warm_start.names`."""

EXIT: Final = "exit.json"
"""The record of the launcher's end."""

AGENT_STATE: Final = "agent-state.json"
"""The state that a restarted agent needs."""
SHIPPED_LOGS: Final = "logs-shipped.json"
"""The position up to which the log was copied."""
SHIPPED_EVENTS: Final = "events-shipped.json"
"""The positions up to which the files of events were copied."""

LONGEST_SOCKET_PATH: Final = 107
"""The maximum length of a socket's path on Linux, in bytes."""


def output_log(run_directory: Path) -> Path:
    """Returns the path of the newest part of the command's output."""
    return run_directory / LOGS / OUTPUT_LOG


def outbox(run_directory: Path, destination: str) -> Path:
    """Returns the path of the agent's journal of undelivered messages to a destination."""
    return run_directory / f"outbox-{destination}.json"


def torchrun_events(run_directory: Path) -> Path:
    """Returns the path of the newest file with torchruns' events."""
    return run_directory / EVENTS / TORCHRUN_EVENTS


def folders(run_directory: Path) -> tuple[Path, ...]:
    """Returns the folders that exist before the command starts."""
    return tuple(run_directory / name for name in (LOGS, PROGRESS, STACKS, ERRORS, EVENTS))


def short_links() -> Path:
    """Returns the folder of this user's links to run directories whose own paths are too long for sockets."""
    # Ranks import this module, and not all that `tempfile` needs.
    import tempfile

    return Path(tempfile.gettempdir()) / f"perdure-{os.getuid()}"
