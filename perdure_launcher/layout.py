"""Names in the run directory, the folder that the agent, the launcher, torchrun's handler and the ranks share.

docs/node-protocol.md says who writes and reads what.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

AGENT_SOCKET: Final = "agent.sock"
"""The longest path of a socket in here: the others are in folders that only their own processes enter."""

LOGS: Final = "logs"
OUTPUT_LOG: Final = "output.log"
"""In `logs`: the command's output; older parts have `.1`, `.2`, …"""
ROTATED_LOGS: Final = 4
"""How many older parts are kept."""
AGENT_LOG: Final = "agent.log"
"""In `logs`."""

PROGRESS: Final = "progress"
"""A folder with a file for each rank of the node."""

ERRORS: Final = "errors"
"""A folder with error files of ranks."""
RANK_EXITS: Final = "rank-exits.json"
"""In `errors`: exits that the agent does not have yet."""

RENDEZVOUS_STATE: Final = "rendezvous-state"
"""What torchruns of this node must know of each other."""

INJECTED: Final = "inject"
"""The folder that PYTHONPATH begins with."""

WARM: Final = "warm"
"""The folder of warm starts, described in `warm_start.names`."""

EXIT: Final = "exit.json"
"""How the launcher ended."""

AGENT_STATE: Final = "agent-state.json"
"""What an agent must remember when it is started again."""
SHIPPED_LOGS: Final = "logs-shipped.json"
"""How far the log has been copied."""

LONGEST_SOCKET_PATH: Final = 107
"""Bytes that Linux allows for the path of a socket."""


def output_log(run_directory: Path) -> Path:
    """The newest part of the command's output."""
    return run_directory / LOGS / OUTPUT_LOG


def outbox(run_directory: Path, destination: str) -> Path:
    """The agent's journal of what it has not delivered to a destination."""
    return run_directory / f"outbox-{destination}.json"


def folders(run_directory: Path) -> tuple[Path, ...]:
    """Those that are there before the command starts."""
    return tuple(run_directory / name for name in (LOGS, PROGRESS, ERRORS))
