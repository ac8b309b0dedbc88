"""Programs of a job of several roles whose nodes are pods: one prepares, one serves, one calls the servers."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path


def prepare(out: Path) -> None:
    note(out, f"prepare {own_address()}")
    while not (out / "go").exists():
        time.sleep(0.1)
    (out / "prepared").touch()


def serve(out: Path) -> None:
    assert (out / "prepared").exists(), "started before what it depends on has completed"
    note(out, f"serve {os.environ['RANK']} {own_address()}")
    with socket.create_server(("", int(os.environ["PERDURE_PORT"]))) as server:
        while True:
            connection, _ = server.accept()
            connection.sendall(own_address().encode())
            connection.close()


def call(out: Path) -> None:
    """Calls the servers by the addresses that it was started with, and notes which pod has answered."""
    addresses = json.loads(os.environ["PERDURE_ROLES"])["ps"]["addresses"]
    answered: dict[str, str] = {}
    while True:
        for address in addresses:
            host, _, port = address.rpartition(":")
            try:
                with socket.create_connection((host, int(port)), timeout=1.0) as connection:
                    pod = connection.recv(100).decode()
            except OSError:
                continue
            if pod and answered.get(address) != pod:
                answered[address] = pod
                note(out, f"call {address} {pod}")
        time.sleep(0.2)


def own_address() -> str:
    return socket.gethostbyname(socket.gethostname())


def note(out: Path, line: str) -> None:
    with (out / "notes").open("a") as file:
        file.write(f"{line}\n")


{"prepare": prepare, "serve": serve, "call": call}[sys.argv[1]](Path(sys.argv[2]))
