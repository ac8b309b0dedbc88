"""Tests of the ports that tests choose: two processes never choose the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.ports import free_port, free_ports

_CHOOSES = "from tests.support.ports import free_ports; print(*free_ports(20), flush=True); input()"


def test_a_process_with_another_folder_for_temporary_files_chooses_other_ports(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _CHOOSES]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=Path.cwd()
    ) as other:
        assert other.stdout is not None
        theirs = {int(port) for port in other.stdout.readline().split()}
        ours = {*free_ports(20), *(free_port() for _ in range(20))}
        other.communicate("\n")
    assert len(theirs) == 20
    assert len(ours) == 40
    assert not theirs & ours
