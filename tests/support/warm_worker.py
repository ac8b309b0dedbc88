"""`python -m tests.support.warm_worker worker`: a worker that forks the agents of jobs whose names say so."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.main import main
from perdure.local import control_plane
from perdure.local.processes import spawn
from tests.support.warm_agents import WARM, warm_agents

_REPOSITORY = Path(__file__).parents[2]
_COLD = "perdure.cli.main"


@contextlib.contextmanager
def warm_workers() -> Iterator[None]:
    """Has control planes that this process starts meanwhile run such workers."""

    def start(command: Sequence[str], *, environment: Mapping[str, str], **options: Any) -> tuple[int, float]:
        if _COLD in command:
            command = [__name__ if word == _COLD else word for word in command]
            environment = {**environment, "PYTHONPATH": str(_REPOSITORY)}
        return spawn(command, environment=environment, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_plane, "spawn", start)
        yield


if __name__ == "__main__":
    # What a node's processes inherit is a worker's own environment.
    os.environ.pop("PYTHONPATH")
    with warm_agents(WARM):
        main()
