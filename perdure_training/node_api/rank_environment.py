"""The variables by which the launcher tells a process which rank it is, for all that runs in ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from perdure_training.node_api.bodies import KnownStates, UnsoundSteps
from perdure_training.node_api.codec import decode

GENERATION_VARIABLE: Final = "PERDURE_GENERATION"
PROGRESS_VARIABLE: Final = "PERDURE_PROGRESS_DIR"
RUN_ID_VARIABLE: Final = "PERDURE_RUN_ID"
ROLE_VARIABLE: Final = "PERDURE_ROLE"
"""The name of the process's role."""
ROLES_VARIABLE: Final = "PERDURE_ROLES"
"""The addresses of all roles when the process started, as JSON, in a job of several."""
PORT_VARIABLE: Final = "PERDURE_PORT"
"""The port at which a process of a role with `ready` serves others."""
ADDRESS_VARIABLE: Final = "PERDURE_NODE_ADDRESS"
"""The node's own address, as its launcher knows it."""
ROLLS_BACK_VARIABLE: Final = "PERDURE_ROLLS_BACK"
"""Set where the job goes back to a sound state when a loss is not a number, so that such a state is not saved."""
SPIKES_VARIABLE: Final = "PERDURE_REPORT_SPIKES"
"""Set where spikes of the loss and of the gradient norm are reported."""
UNSOUND_VARIABLE: Final = "PERDURE_UNSOUND"
"""`UnsoundSteps` as GENERATION:AFTER:FOUND_AT; empty for none."""
SCRIPT_FAILURES_VARIABLE: Final = "PERDURE_SCRIPT_FAILURES"
"""The newest generations that the script's own failures have ended, with commas; unset where that is not known."""
KNOWN_VARIABLE: Final = "PERDURE_KNOWN_STATES"
"""`KnownStates` as JSON; unset where they are not known."""
PROCESS_VARIABLE: Final = "PERDURE_RANK_PROCESS"
"""The process that is the rank, as PID and PID namespace: it sets the variable, and the processes that it starts
inherit it. `TRAINS` follows where they start after the rank has begun to train."""
TRAINS: Final = "trains"
SOLE_VARIABLE: Final = "PERDURE_SOLE_RANK"
"""Set where the job has one rank, which Perdure's launcher starts: that may be a program which starts a torchrun."""


def is_rank(environment: Mapping[str, str]) -> bool:
    """Returns whether the launcher started a process with this environment as a rank."""
    return bool(environment.get(PROGRESS_VARIABLE)) and has_job_rank(environment)


def has_job_rank(environment: Mapping[str, str]) -> bool:
    """Returns whether the process's rank is one of the job.

    In a torchrun that a rank starts for purposes of its own, other processes have the same numbers.
    """
    run_id = environment.get(RUN_ID_VARIABLE)
    return "RANK" in environment and environment.get("TORCHELASTIC_RUN_ID", run_id) == run_id


def is_rank_below(environment: Mapping[str, str]) -> bool:
    """Returns whether this process is one of the ranks that the job's only rank has started by a torchrun, to train in
    its place.

    Where the rank itself trains, a torchrun that it starts is for purposes of its own.
    """
    started = bool(environment.get(PROGRESS_VARIABLE)) and SOLE_VARIABLE in environment and "RANK" in environment
    claim = environment.get(PROCESS_VARIABLE, "")
    return started and not has_job_rank(environment) and bool(claim) and not claim.endswith(f" {TRAINS}")


def is_rank_itself(environment: Mapping[str, str]) -> bool:
    """Returns whether this process is its rank, and not one that the rank has started: a compile worker, a worker of a
    loader, an evaluation.

    Only meaningful where `is_rank` holds. What no process has claimed is this process's.
    """
    number, _, rest = environment.get(PROCESS_VARIABLE, "").partition(" ")
    if not number:
        return True
    return number == str(os.getpid()) and rest.split()[:1] == [own_pid_namespace()]


def is_child_of_training_rank(environment: Mapping[str, str]) -> bool:
    """Returns whether this process was started by a rank that trained already, so that it cannot be the one that trains
    in the rank's place."""
    return not is_rank_itself(environment) and environment[PROCESS_VARIABLE].endswith(f" {TRAINS}")


def own_pid_namespace() -> str:
    """Returns the PID namespace of this process; empty on systems without."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def generation_of(environment: Mapping[str, str]) -> int:
    """Returns the generation of the world that a rank belongs to.

    Raises:
        ValueError: if the variable is not as the launcher sets it.
    """
    return int(environment.get(GENERATION_VARIABLE, "0"))


def unsound_steps_of(environment: Mapping[str, str]) -> UnsoundSteps | None:
    """Returns the saved states that the rank's world does not load; None for none.

    Raises:
        ValueError: if the variable is not as the launcher sets it.
    """
    text = environment.get(UNSOUND_VARIABLE)
    if not text:
        return None
    newest, *earlier = map(_unsound, text.split(","))
    return replace(newest, earlier=tuple(earlier))


def _unsound(text: str) -> UnsoundSteps:
    generation, after, found_at = map(int, text.split(":"))
    return UnsoundSteps(generation=generation, after=after, found_at=found_at)


def script_failures_of(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """Returns the newest generations that the script's own failures have ended; None where that is not known.

    Raises:
        ValueError: if the variable is not as the launcher sets it.
    """
    text = environment.get(SCRIPT_FAILURES_VARIABLE)
    return None if text is None else tuple(map(int, filter(None, text.split(","))))


def known_states_of(environment: Mapping[str, str]) -> KnownStates | None:
    """Returns the saved states of which the job knows; None where it does not say it.

    Raises:
        ValueError: if the variable is not as the launcher sets it.
    """
    text = environment.get(KNOWN_VARIABLE)
    return decode(KnownStates, json.loads(text)) if text else None


def run_directory_of(environment: Mapping[str, str]) -> Path | None:
    """Returns the run directory of the node that a process of the command is on; None outside of Perdure."""
    directory = environment.get(PROGRESS_VARIABLE)
    return Path(directory).parent if directory else None
