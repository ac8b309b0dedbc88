"""Names that supervisor, shim and warm interpreter share. It is imported at the start of each rank, so it is small."""

from __future__ import annotations

import contextlib
import json
import os

from ..system.files import write_file

FOLDER_VARIABLE = "PERDURE_WARM"
"""Environment variable with the folder of the socket and of the records of starts."""
PYTHON_VARIABLE = "PERDURE_WARM_PYTHON"
"""Environment variable with the interpreter that torchrun would start otherwise."""
LISTENING_VARIABLE = "PERDURE_WARM_LISTENING"
"""Environment variable of the warm interpreter and of standbys: the descriptor on which they receive requests."""
STANDBY_VARIABLE = "PERDURE_WARM_STANDBY"
"""Environment variable of a standby: its local rank."""
EXECUTABLE_VARIABLE = "PYTHON_EXEC"
"""Environment variable with the executable with which torchrun starts ranks."""

OURS = (FOLDER_VARIABLE, PYTHON_VARIABLE, EXECUTABLE_VARIABLE)

SOCKET = "socket"
PID = "pid"
"""A file with the warm interpreter's process ID."""
REFUSAL = "refusal"
"""A file with the reason why there is no warm interpreter."""

LEARNED = "learned"
"""A JSON file with the report of the imports that were made in advance, and of those that could not be."""

PACKAGES = "packages"
"""A JSON file with the folders of installed packages, and the state in which the imports have found each."""

STANDBYS = "standbys"
"""A JSON file with the available standbys, and why they exist."""

ALL_COLD = "all-cold"
"""A file with the reason why no rank is started through the shim."""

START_PREFIX = "start-"
"""Prefix of the files that record each local rank's last start."""

WARM = "warm"
STARTED = "started"
COLD = "cold"
ENDED = "ended"

DEVICES = frozenset({"CUDA_VISIBLE_DEVICES"})
"""Variables that CUDA reads at its initialization, and some packages when they are imported. With torchrun's
--virtual-local-rank they differ between ranks."""

PLACES_THAT_STAY = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    }
)
"""Variables that keep their values when a rank is restarted, unless its world has changed."""

_OF_ONE_RANK = frozenset(
    {
        *PLACES_THAT_STAY,
        *("MASTER_ADDR", "MASTER_PORT"),
        # Set by torchrun for each rank, and read when a process group is created.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        *DEVICES,
        # Set by a shell between torchrun and the rank.
        *("_", "PWD", "OLDPWD", "SHLVL"),
        *OURS,
    }
)
_OF_ONE_RANK_PREFIXES = ("TORCHELASTIC_", "PERDURE_")


def of_one_rank(variable: str) -> bool:
    """Returns whether a variable depends on the rank or its world: it differs between ranks, so no import may read
    it."""
    return variable in _OF_ONE_RANK or variable.startswith(_OF_ONE_RANK_PREFIXES)


def record_start(folder: str, *, warm: bool, standby: bool = False, reason: str = "") -> None:
    """Records how this process's rank was started. Errors are ignored, since they must not keep a rank from
    starting."""
    # Not at the top: the shim, which is one more start for each rank, records nothing unless it starts the rank cold.
    from perdure_training.node_api.local_rank import local_rank_of

    generation = os.environ.get("PERDURE_GENERATION", "")
    start = {
        "generation": int(generation) if generation.isdecimal() else 0,
        "pid": os.getpid(),
        "warm": warm,
        "standby": standby,
        "reason": reason,
    }
    path = f"{folder}/{START_PREFIX}{local_rank_of(os.environ)}"
    with contextlib.suppress(OSError):
        write_file(path, json.dumps(start))
