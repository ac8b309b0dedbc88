"""The plan of a warm interpreter: the command line and environment of the ranks that it can start.

It is not stored anywhere: the interpreter is started with exactly these, and they are read back from its process, so
that no secret of the environment is written to disk.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..system.processes import environment_of
from .context import difference
from .names import FOLDER_VARIABLE, LISTENING_VARIABLE, OURS, STANDBY_VARIABLE, of_one_rank
from .proc_environ import GENERATION_VARIABLE, ROOM

AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""torch's variable that controls whether `import torch` loads device plugins, including ours."""

START = "start"
"""The folder that is first on the interpreter's path, and that ranks must not see."""

_USERS_AUTOLOAD_VARIABLE = "PERDURE_WARM_AUTOLOAD"


@dataclass(frozen=True)
class Plan:
    """The ranks' Python command line and environment, without the variables that depend on the rank."""

    arguments: tuple[str, ...]
    """Python's options, the script, and the script's arguments."""
    environment: Mapping[str, str]

    @classmethod
    def of_ranks(cls, arguments: Sequence[str], environment: Mapping[str, str]) -> Plan:
        """Creates the plan for ranks with these arguments and this environment."""
        return cls(tuple(arguments), {name: value for name, value in environment.items() if name not in OURS})

    @classmethod
    def of_process(cls, pid: int) -> Plan:
        """Reads the plan that a warm interpreter was started with.

        Raises:
            OSError: if the process is gone.
        """
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")[1:-1]
        environment = environment_of(pid)
        environment.pop(AUTOLOAD_VARIABLE, None)
        if (autoload := environment.pop(_USERS_AUTOLOAD_VARIABLE, None)) is not None:
            environment[AUTOLOAD_VARIABLE] = autoload
        _, _, path = environment.pop("PYTHONPATH", "").partition(os.pathsep)
        if path:
            environment["PYTHONPATH"] = path
        for name in (*OURS, LISTENING_VARIABLE, STANDBY_VARIABLE, GENERATION_VARIABLE):
            environment.pop(name, None)
        return cls(tuple(map(os.fsdecode, words)), environment)

    def starting_environment(self, folder: Path, *, listening: int) -> dict[str, str]:
        """Returns the environment to start the interpreter with."""
        path = self.environment.get("PYTHONPATH")
        start = str(folder / START)
        environment = {
            **self.environment,
            "PYTHONPATH": f"{start}{os.pathsep}{path}" if path else start,
            # Each rank loads plugins itself: they may read its rank variables, or start threads.
            AUTOLOAD_VARIABLE: "0",
            FOLDER_VARIABLE: str(folder),
            LISTENING_VARIABLE: str(listening),
            GENERATION_VARIABLE: ROOM,
        }
        if (autoload := self.environment.get(AUTOLOAD_VARIABLE)) is not None:
            environment[_USERS_AUTOLOAD_VARIABLE] = autoload
        return environment

    @property
    def script_index(self) -> int:
        """The index of the script or module in `arguments`."""
        return next((index for index, word in enumerate(self.arguments) if not word.startswith("-")), 0)

    @property
    def script(self) -> str | None:
        """The script's path; None for `-m` and `-c`."""
        index = self.script_index
        return None if {"-m", "-c"}.intersection(self.arguments[:index]) else self.arguments[index]

    def difference(
        self, arguments: Sequence[str], environment: Mapping[str, str], *, read: Collection[str] = ()
    ) -> str:
        """Describes how a rank with these arguments and this environment differs from the plan; empty if it can be
        forked. The script's own arguments may differ, because it has not read them yet, and so may rank variables that
        no import read."""
        script = self.script_index
        expected, requested = self.arguments[: script + 1], tuple(arguments[: script + 1])
        if requested != expected:
            return f"it runs {' '.join(requested)}, and not {' '.join(expected)}"
        if names := difference(_comparable(self.environment, read), _comparable(environment, read)):
            return f"its environment differs in {names}"
        return ""


def _comparable(environment: Mapping[str, str], read: Collection[str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name in read or not of_one_rank(name)}
