"""Measures this machine as the ranks of a job see it: processor, memory, disks, names, and on request its devices.

A slow disk or a dead name server answers nothing, so each check has its time, and one that does not end within it has
failed. Nothing is judged here: whether a figure is low shows only beside those of other machines.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from perdure_training.node_api.addresses import host_and_port
from perdure_training.node_api.bodies import CheckFigure, CheckRequest

from ..config import LauncherConfig
from ..supervisor.python_commands import python_command
from ..system.interfaces import interface_of
from ..watched_folder import folder_of

CHECK_WITHIN = 5.0
"""Seconds for one check of a folder or a name."""
TORCH_WITHIN = 60.0
"""Seconds for the checks that import torch, which takes long on a machine that is busy."""

_NODE = "PERDURE_NODE"
"""The mark by which leftover processes of a node are found."""
_MEGABYTE = 1_000_000
_HASHED = 1 << 20
_HASHES = 8
_COPIED = 32 << 20
"""Bytes: more than what most processors keep of memory near to one core."""
_BEST_OF = 5
"""Measurements of which the fastest counts: other processes of the machine disturb some."""
_WRITTEN = 8 << 20


@dataclass(frozen=True)
class _Check:
    """One check: what it measures, and how."""

    name: str
    subject: str
    unit: str
    measure: Callable[[], float]


def run(config: LauncherConfig, request: CheckRequest, environment: Mapping[str, str]) -> tuple[CheckFigure, ...]:
    """Carries out the checks of a request.

    Args:
        config: The node's command and its folders.
        request: The kind of checks.
        environment: The variables of the command.
    """
    if request.kind == "link":
        place = host_and_port(request.address, request.port)
        return _torch(config, environment, [request.address, place, str(request.rank)])
    figures = tuple(_within(check) for check in _checks(config, environment))
    return (*figures, *_torch(config, environment, [])) if request.kind == "full" else figures


def _checks(config: LauncherConfig, environment: Mapping[str, str]) -> list[_Check]:
    folders = {
        "run directory": config.run_directory,
        "temporary folder": Path(environment.get("TMPDIR") or tempfile.gettempdir()),
    }
    if config.watch:
        folders["checkpoint.watch"] = folder_of(config.watch, environment)
    found = [
        _Check("processor", "", "MB/s", _hash),
        _Check("memory", "", "MB/s", _copy),
        _Check("names", socket.gethostname(), "s", _resolve),
    ]
    for subject, folder in folders.items():
        found.append(_Check("room", subject, "MB", lambda folder=folder: _room(folder)))
        found.append(_Check("disk", subject, "MB/s", lambda folder=folder: _write(folder)))
    return found


def _within(check: _Check) -> CheckFigure:
    """Runs a check on a thread of its own, which is left behind if it does not end in time."""
    figure = CheckFigure(name=check.name, subject=check.subject, unit=check.unit)
    ended: list[CheckFigure] = []

    def measure() -> None:
        try:
            ended.append(replace(figure, value=check.measure()))
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            ended.append(replace(figure, problem=f"{where}{error.strerror or error}"))

    begun = time.monotonic()
    thread = threading.Thread(target=measure, name=f"check {check.name}", daemon=True)
    thread.start()
    thread.join(CHECK_WITHIN)
    result = ended[0] if ended else replace(figure, problem=f"it has not ended within {CHECK_WITHIN:g} s")
    return replace(result, seconds=round(time.monotonic() - begun, 3))


def _hash() -> float:
    """One core's arithmetic: SHA-256, which releases Python's lock."""
    content = bytes(_HASHED)

    def work() -> None:
        for _ in range(_HASHES):
            hashlib.sha256(content)

    return _HASHED * _HASHES / _MEGABYTE / _fastest(work)


def _copy() -> float:
    source, target = ctypes.create_string_buffer(_COPIED), ctypes.create_string_buffer(_COPIED)
    return _COPIED / _MEGABYTE / _fastest(lambda: ctypes.memmove(target, source, _COPIED))


def _fastest(work: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(_BEST_OF):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return max(min(times), 1e-9)


def _resolve() -> float:
    """gloo finds the machine's own address by its name."""
    begun = time.perf_counter()
    socket.getaddrinfo(socket.gethostname(), None)
    return time.perf_counter() - begun


def _room(folder: Path) -> float:
    found = os.statvfs(_existing(folder))
    return found.f_bavail * found.f_frsize / _MEGABYTE


def _write(folder: Path) -> float:
    content = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=_existing(folder), buffering=0) as file:
        begun = time.perf_counter()
        try:
            for _ in range(_WRITTEN // len(content)):
                if file.write(content) != len(content):
                    raise OSError(28, "No space left on device")
            os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(folder)) from error
        return _WRITTEN / _MEGABYTE / max(time.perf_counter() - begun, 1e-9)


def _existing(folder: Path) -> Path:
    """Returns the folder, or what exists of its path: the script may create it."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _torch(config: LauncherConfig, environment: Mapping[str, str], link: list[str]) -> tuple[CheckFigure, ...]:
    """Has a process of its own measure with torch; it ends before it can be in the way of ranks."""
    name = "link" if link else "matmul"
    program = str(Path(__file__).with_name("torch_checks.py"))
    variables = {name: value for name, value in environment.items() if not name.startswith("PERDURE_") or name == _NODE}
    # As the ranks have it: gloo's own choice may be an interface through which no other node is reached.
    if interface := interface_of(config.address):
        variables.setdefault("GLOO_SOCKET_IFNAME", interface)
    begun = time.monotonic()
    try:
        ended = subprocess.run(
            [_python(config, environment), program, *link],
            env=variables,
            capture_output=True,
            timeout=TORCH_WITHIN,
            check=False,
        )
        problem = _last_line(ended.stderr)
        figures = _figures(ended.stdout)
    except subprocess.TimeoutExpired:
        figures, problem = (), f"it has not ended within {TORCH_WITHIN:g} s"
    except OSError as error:
        figures, problem = (), str(error)
    seconds = round(time.monotonic() - begun, 3)
    if not figures:
        return (CheckFigure(name=name, problem=problem or "it has printed nothing", seconds=seconds),)
    return tuple(replace(figure, seconds=seconds) for figure in figures)


def _python(config: LauncherConfig, environment: Mapping[str, str]) -> str:
    """The interpreter of the command, which has its torch."""
    path, workdir = environment.get("PATH", os.defpath), config.workdir or Path.cwd()
    command = python_command(config.command, path=path, workdir=workdir)
    if command is not None:
        return command.python
    beside = Path(shutil.which(config.command[0], path=path) or sys.executable).with_name("python")
    return str(beside) if beside.exists() else sys.executable


def _figures(output: bytes) -> tuple[CheckFigure, ...]:
    found: list[CheckFigure] = []
    for line in output.splitlines():
        try:
            fields: Any = json.loads(line)
            found.append(CheckFigure(**cast("dict[str, Any]", fields)))
        except (ValueError, TypeError):
            continue
    return tuple(found)


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
