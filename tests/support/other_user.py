"""Another user of this machine, who has Temporal's command line and no key.

Tests of what that user reads of this machine ask for the fixture `root`. A server on a port distinguishes no users: for
attacks on it, without root, the programs run as this user, with nothing of this process's environment and folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.command_line import Finished
from tests.support.temporal_server import temporal_binary
from tests.support.waiting import DEADLINE

UID = 65534


@dataclass(frozen=True)
class OtherUser:
    """Runs programs as that user."""

    folder: Path
    """A folder that everybody may write to."""
    address: str
    """The Temporal server that it attacks."""

    def run(self, *command: str, **environment: str) -> Finished:
        """Runs a program."""
        user: dict[str, Any] = {"user": UID, "group": UID, "extra_groups": []} if os.geteuid() == 0 else {}
        done = subprocess.run(
            command,
            **user,
            cwd=self.folder,
            env={"HOME": str(self.folder), "PATH": os.defpath, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        return Finished(code=done.returncode, out=done.stdout, err=done.stderr)

    def temporal(self, *arguments: str, within: str = f"{DEADLINE:g}s", **environment: str) -> Finished:
        """Runs Temporal's command line."""
        binary = str(self.folder / "temporal")
        return self.run(binary, *arguments, "--address", self.address, "--command-timeout", within, **environment)


@contextmanager
def other_user(address: str) -> Iterator[OtherUser]:
    """The other user."""
    with tempfile.TemporaryDirectory(prefix="other-user-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        # The cached one lies in root's own folder.
        shutil.copy(temporal_binary(), folder / "temporal")
        yield OtherUser(folder, address)
