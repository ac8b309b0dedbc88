"""What `perdure shell` starts in a node: a shell, or a command, where the node's command runs and with its environment.

Nothing of ours is in that environment: what is started there takes no part in the job.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from typing import NoReturn

from ..config import LauncherConfig, load_config


def enter(command: Sequence[str]) -> NoReturn:
    """Becomes the command, or a shell.

    Raises:
        ConfigError: if there is no node here.
        OSError: if the folder or the command cannot be had.
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
    """The node's own variables and the job's, without those by which its processes are told."""
    return {name: value for name, value in inherited.items() if not name.startswith("PERDURE_")} | dict(config.env)
