"""Programs of a job of several roles: one prepares a file, one serves at its port, one follows the addresses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from perdure_training import roles


def prepare(out: Path) -> None:
    note(out, f"prepare {os.getpid()}")
    (out / "prepared").touch()


def serve(out: Path) -> None:
    assert (out / "prepared").exists(), "started before what it depends on has completed"
    note(out, f"serve {os.environ['RANK']} {os.getpid()}")
    with socket.create_server(("127.0.0.1", int(os.environ["PERDURE_PORT"]))) as server:
        while True:
            server.accept()[0].close()


def serve_hot(out: Path) -> None:
    """Serves as all do, but a child of the second node computes all the time."""
    if os.environ["RANK"] == "1":
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
    serve(out)


def follow(out: Path) -> None:
    known = roles.wait_for("ps")
    note(out, f"follow {os.getpid()} {','.join(known.addresses)} {os.environ['PERDURE_ROLES'].count('ps')}")
    for all_roles in roles.watch():
        ps = all_roles["ps"]
        note(out, f"saw {ps.generation} {ps.ready} {','.join(ps.addresses)}")


def wait(out: Path) -> None:
    note(out, f"wait {os.environ['PERDURE_ROLE']}")
    signal.pause()


def note(out: Path, line: str) -> None:
    with (out / "notes").open("a") as file:
        file.write(f"{time.time():.3f} {line}\n")


{"prepare": prepare, "serve": serve, "serve-hot": serve_hot, "follow": follow, "wait": wait}[sys.argv[1]](
    Path(sys.argv[2])
)
