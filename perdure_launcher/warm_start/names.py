"""What keeper, stand-in and warm interpreter agree on. Imported at the start of each rank, so it is small."""

from __future__ import annotations

import contextlib
import json
import os

FOLDER_VARIABLE = "PERDURE_WARM"
"""The folder with the socket and the records of starts."""
PYTHON_VARIABLE = "PERDURE_WARM_PYTHON"
"""The interpreter that would be started without us."""
LISTENING_VARIABLE = "PERDURE_WARM_LISTENING"
"""For the warm interpreter and for standbys: the descriptor on which they are asked for ranks."""
STANDBY_VARIABLE = "PERDURE_WARM_STANDBY"
"""For a standby: the local rank that it is for."""
EXECUTABLE_VARIABLE = "PYTHON_EXEC"
"""What torchrun starts ranks with."""

OURS = (FOLDER_VARIABLE, PYTHON_VARIABLE, EXECUTABLE_VARIABLE)

SOCKET = "socket"
PID = "pid"
"""A file with the warm interpreter's process ID."""
REFUSAL = "refusal"
"""A file that says why there is no warm interpreter."""

LEARNED = "learned"
"""A file that says what was imported ahead because ranks import it, and what could not be, as JSON."""

STANDBYS = "standbys"
"""A file that says which standbys there are, and why, as JSON."""

ALL_COLD = "all-cold"
"""A file that says why no rank goes through the stand-in."""

START_PREFIX = "start-"
"""Files that say how each local rank was started last."""

WARM = "warm"
STARTED = "started"
COLD = "cold"
ENDED = "ended"

DEVICES = frozenset({"CUDA_VISIBLE_DEVICES"})
"""Read when CUDA is initialised, and by some packages when they are imported. With torchrun's --virtual-local-rank each
rank has its own."""

PLACES_THAT_STAY = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    }
)
"""What a rank that is started again finds as before, unless its world has changed."""

_OF_ONE_RANK = frozenset(
    {
        *PLACES_THAT_STAY,
        *("MASTER_ADDR", "MASTER_PORT"),
        # Set by torchrun for each rank, read when a process group is made.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        *DEVICES,
        # A shell's own bookkeeping, where one stands in between.
        *("_", "PWD", "OLDPWD", "SHLVL"),
        *OURS,
    }
)
_OF_ONE_RANK_PREFIXES = ("TORCHELASTIC_", "PERDURE_")


def of_one_rank(variable: str) -> bool:
    """Whether a variable places a rank in a world: it differs between ranks, and nothing may read it while imported."""
    return variable in _OF_ONE_RANK or variable.startswith(_OF_ONE_RANK_PREFIXES)


def record_start(folder: str, *, warm: bool, standby: bool = False, reason: str = "") -> None:
    """Writes down how this process's rank was started; best effort, as nothing may keep a rank from starting."""
    generation = os.environ.get("PERDURE_GENERATION", "")
    start = {
        "generation": int(generation) if generation.isdecimal() else 0,
        "pid": os.getpid(),
        "warm": warm,
        "standby": standby,
        "reason": reason,
    }
    path = f"{folder}/{START_PREFIX}{os.environ.get('LOCAL_RANK', '0')}"
    with contextlib.suppress(OSError):
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(start, file)
        os.replace(f"{path}.new", path)
