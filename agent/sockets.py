"""Sockets in the run directory."""

from __future__ import annotations

import os
import secrets
import socket
import stat
from pathlib import Path

from perdure_training.node_api.untrusted_files import NotARegularFile, folder_beneath


def listen_beneath(folder: Path, name: str, *, backlog: int) -> socket.socket:
    """Listens at a socket that every user can connect to.

    It replaces the socket of an earlier agent atomically, so that clients always find one. Others may write to the
    folder: no link there leads elsewhere.

    Raises:
        OSError: if it cannot be created.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    draft = f".{secrets.token_hex(4)}"
    with folder_beneath(folder) as within:
        listener.bind(f"/proc/self/fd/{within}/{draft}")
        _open_to_all(draft, within)
        listener.listen(backlog)
        os.replace(draft, name, src_dir_fd=within, dst_dir_fd=within)
    return listener


def _open_to_all(name: str, within: int) -> None:
    descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            raise NotARegularFile(f"{name} was replaced")
        os.chmod(f"/proc/self/fd/{descriptor}", 0o666)
    finally:
        os.close(descriptor)
