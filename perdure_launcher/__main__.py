"""`python -m perdure_launcher`: the parent of one node's training, configured by `PERDURE_LAUNCHER_CONFIG`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from .config import RUN_DIRECTORY_VARIABLE, ConfigError, load_config
from .supervisor.launcher import Launcher, Leaving, write_exit_file
from .supervisor.shell import enter

logger = logging.getLogger("perdure_launcher")

_MISCONFIGURED = 78
_CANNOT_PREPARE = 73
_CRASHED = 70


def main() -> int:
    """Runs the launcher to its end; with the argument `shell`, becomes a shell in the node instead.

    Returns:
        The exit code: 0 after the agent released it, 128 + n after signal n, else one of sysexits.h.
    """
    if sys.argv[1:2] == ["shell"]:
        try:
            enter(sys.argv[2:])
        except (ConfigError, OSError) as error:
            sys.exit(f"perdure shell: {error}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run_directory = Path(os.environ.get(RUN_DIRECTORY_VARIABLE, "."))
    try:
        config = load_config()
        launcher = Launcher(config)
    except ConfigError as error:
        leaving = Leaving(_MISCONFIGURED, str(error))
        logger.error("%s", error)
    except OSError as error:
        leaving = Leaving(_CANNOT_PREPARE, f"the run directory {run_directory} cannot be prepared: {error}")
        logger.error("%s", leaving.reason)
    else:
        try:
            leaving = launcher.run()
        except Exception as error:
            logger.exception("the launcher failed")
            leaving = Leaving(_CRASHED, f"the launcher failed: {type(error).__name__}: {error}")
    write_exit_file(run_directory, leaving)
    return leaving.exit_code


if __name__ == "__main__":
    sys.exit(main())
