"""The processes of the development cluster, which outlive the command that starts them."""

import os
import sys
from pathlib import Path

from scripts.cluster.processes import Processes, await_that


def test_a_process_holds_no_descriptor_that_its_starter_inherited(tmp_path: Path):
    processes = Processes(records=tmp_path / "records", logs=tmp_path / "logs")
    lock = tmp_path / "lock"
    with lock.open("w") as held:
        # As `flock FILE command` leaves it in the command.
        os.set_inheritable(held.fileno(), True)
        program = "import sys; print('started', flush=True); sys.stdin.read(); __import__('signal').pause()"
        processes.start("holder", [sys.executable, "-c", program])
        try:
            await_that(lambda: processes.log("holder").read_text() == "started\n", what="the process", within=60)
            holder = processes.find("holder")
            assert holder is not None
            open_files = {os.readlink(link) for link in Path(f"/proc/{holder.pid}/fd").iterdir()}
            assert str(lock) not in open_files
        finally:
            processes.kill("holder")
