"""The variables by which the launcher tells a process which rank it is, for all that runs in ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from perdure_training.node_api.bodies import UnsoundSteps

GENERATION_VARIABLE: Final = "PERDURE_GENERATION"
PROGRESS_VARIABLE: Final = "PERDURE_PROGRESS_DIR"
RUN_ID_VARIABLE: Final = "PERDURE_RUN_ID"
ROLE_VARIABLE: Final = "PERDURE_ROLE"
"""The name of the process's role."""
ROLES_VARIABLE: Final = "PERDURE_ROLES"
"""The addresses of all roles when the process started, as JSON, in a job of several."""
PORT_VARIABLE: Final = "PERDURE_PORT"
"""The port at which a process of a role with `ready` serves others."""
ROLLS_BACK_VARIABLE: Final = "PERDURE_ROLLS_BACK"
"""Set where the job goes back to a sound state when a loss is not a number, so that such a state is not saved."""
SPIKES_VARIABLE: Final = "PERDURE_REPORT_SPIKES"
"""Set where spikes of the loss and of the gradient norm are reported."""
UNSOUND_VARIABLE: Final = "PERDURE_UNSOUND"
"""`UnsoundSteps` as GENERATION:AFTER:FOUND_AT; empty for none."""


def is_rank(environment: Mapping[str, str]) -> bool:
    """Returns whether the launcher started a process with this environment as a rank."""
    return bool(environment.get(PROGRESS_VARIABLE)) and has_job_rank(environment)


def has_job_rank(environment: Mapping[str, str]) -> bool:
    """Returns whether the process's rank is one of the job.

    In a torchrun that a rank starts for purposes of its own, other processes have the same numbers.
    """
    run_id = environment.get(RUN_ID_VARIABLE)
    return "RANK" in environment and environment.get("TORCHELASTIC_RUN_ID", run_id) == run_id


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
    generation, after, found_at = map(int, text.split(":"))
    return UnsoundSteps(generation=generation, after=after, found_at=found_at)


def run_directory_of(environment: Mapping[str, str]) -> Path | None:
    """Returns the run directory of the node that a process of the command is on; None outside of Perdure."""
    directory = environment.get(PROGRESS_VARIABLE)
    return Path(directory).parent if directory else None
