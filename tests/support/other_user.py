"""Another user of this machine, who has Temporal's command line and no key."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.command_line import Finished
from tests.support.temporal_server import temporal_binary

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
        done = subprocess.run(
            command,
            user=UID,
            group=UID,
            extra_groups=[],
            cwd=self.folder,
            env={"HOME": str(self.folder), "PATH": os.defpath, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return Finished(code=done.returncode, out=done.stdout, err=done.stderr)

    def temporal(self, *arguments: str, within: str = "30s", **environment: str) -> Finished:
        """Runs Temporal's command line."""
        binary = str(self.folder / "temporal")
        return self.run(binary, *arguments, "--address", self.address, "--command-timeout", within, **environment)


@contextmanager
def other_user(address: str) -> Iterator[OtherUser]:
    """The other user; the test is skipped where it cannot become one."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    with tempfile.TemporaryDirectory(prefix="other-user-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        # The cached one lies in root's own folder.
        shutil.copy(temporal_binary(), folder / "temporal")
        yield OtherUser(folder, address)
