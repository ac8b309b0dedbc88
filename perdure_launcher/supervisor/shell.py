"""Implements `perdure shell` in a node: a shell or a command in the node's folder and environment.

That environment has none of Perdure's variables, so its processes take no part in the job.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from typing import NoReturn

from ..config import LauncherConfig, load_config


def enter(command: Sequence[str]) -> NoReturn:
    """Replaces this process with the command, or with a shell.

    Raises:
        ConfigError: if this is not a node.
        OSError: if the folder or the command is unavailable.
    """
    config = load_config()
    environment = shell_environment(config, os.environ)
    if config.workdir is not None:
        os.chdir(config.workdir)
    path = environment.get("PATH", os.defpath)
    words = list(command) or [
        next(shell for shell in ("bash", "sh") if shutil.which(shell, path=path) or shell == "sh")
    ]
    os.execvpe(words[0], words, environment)


def shell_environment(config: LauncherConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of the node and of the job, without those that identify processes of the node."""
    return {name: value for name, value in inherited.items() if not name.startswith("PERDURE_")} | dict(config.env)
