"""`python -m perdure.agent.prepare`: prepares a pod's shared folders before agent and training start.

Standard library only.

The user of the training container must be able to write to the run directory, and the launcher must be available
although the user's image does not contain it. The configurations are passed as variables, since a pod's address is
known only inside it.

    <shared>/lib            the launcher, which the training container runs: `python <shared>/lib`, and the library for
                            training scripts, which the launcher gives to ranks
    <shared>/launcher.json
    <shared>/run            the run directory of docs/node-protocol.md
    <shared>/workdir        the job's code, if it was uploaded
    <agent>/agent.json      readable by the agent only
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import perdure_launcher
import perdure_training
from perdure.agent.workdir import WrongArchive, unpack_workdir
from perdure_training.node_api.layout import folders

_PREFIX = "PERDURE_PREPARE_"

_MAIN = """\
import os
import signal
import sys

# The first process of a container ignores signals that it does not handle, and imports take a while.
signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))

from perdure_launcher.__main__ import main

sys.exit(main())
"""
"""`__main__.py` of the library folder: Python can run the folder, which is then first on its import path."""


def main() -> None:
    """Prepares both folders; may be run again."""
    shared, private = Path(os.environ[f"{_PREFIX}SHARED"]), Path(os.environ[f"{_PREFIX}AGENT"])
    address, host = os.environ[f"{_PREFIX}ADDRESS"], os.environ[f"{_PREFIX}HOST"]
    library = shared / "lib"
    for module in (perdure_launcher, perdure_training):
        package = Path(next(iter(module.__path__)))
        shutil.copytree(package, library / package.name, dirs_exist_ok=True)
    (library / "__main__.py").write_text(_MAIN, encoding="utf-8")
    run_directory = shared / "run"
    for folder in (run_directory, *folders(run_directory)):
        folder.mkdir(exist_ok=True)
        # Two unprivileged users share it. The mode must not depend on the umask.
        folder.chmod(0o777)
    if parts := os.environ.get(f"{_PREFIX}ARCHIVE"):
        digest, workdir = os.environ[f"{_PREFIX}ARCHIVE_DIGEST"], os.environ[f"{_PREFIX}WORKDIR"]
        try:
            unpack_workdir(Path(parts), digest, Path(workdir))
        except WrongArchive as wrong:
            sys.exit(str(wrong))
    launcher = json.loads(os.environ[f"{_PREFIX}LAUNCHER_CONFIG"]) | {"address": address}
    (shared / "launcher.json").write_text(json.dumps(launcher), encoding="utf-8")
    agent = json.loads(os.environ[f"{_PREFIX}AGENT_CONFIG"]) | {"address": address, "host": host}
    configuration = private / "agent.json"
    configuration.touch(mode=0o600)
    configuration.write_text(json.dumps(agent), encoding="utf-8")


if __name__ == "__main__":
    main()
