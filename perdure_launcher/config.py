"""Configuration of the launcher: one JSON file, validated at the start so that errors name the wrong field."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

from perdure_training.node_api.layout import AGENT_SOCKET, ERRORS, LOGS, LONGEST_SOCKET_PATH, PROGRESS

from .system.ports import parse_ports

CONFIG_VARIABLE = "PERDURE_LAUNCHER_CONFIG"
RUN_DIRECTORY_VARIABLE = "PERDURE_RUN_DIR"

Rendezvous = Literal["auto", "torchrun", "env"]

_RENDEZVOUS = ("auto", "torchrun", "env")
_LARGEST_PORT = 65_535
_NODES = re.compile(r"(\d+)(?::(\d+))?")


class ConfigError(Exception):
    """The launcher cannot start with this configuration; the message says which field to change, and to what."""


@dataclass(frozen=True, kw_only=True)
class LauncherConfig:
    """One node's command, and how to run it."""

    command: tuple[str, ...]
    run_id: str
    run_directory: Path
    """The run directory, which agent and launcher share."""
    workdir: Path | None = None
    """The command's working directory; None for the launcher's own."""
    env: Mapping[str, str] = field(repr=False)
    """Variables added to the command's environment."""
    secrets: tuple[str, ...] = ()
    """Names of variables in the launcher's own environment that hold secrets."""
    min_nodes: int = 1
    max_nodes: int = 1
    role: str = ""
    """The name of the node's role."""
    slot: int = 0
    """The number of the node in its role."""
    port: int | None = None
    """The port at which the command serves others; None for one that serves none."""
    processes: int | None = None
    """Ranks per node; None for one per GPU, or one where there is none."""
    rendezvous: Rendezvous = "auto"
    address: str = "127.0.0.1"
    """The address at which other nodes reach this one."""
    store_ports: range | None = None
    """The ports that a world's store may listen on; None for any free port."""
    stop_grace: timedelta = timedelta(seconds=2)
    """Time from SIGTERM to SIGKILL for ranks of a generation that is over."""
    termination_grace: timedelta = timedelta(seconds=30)
    """Time from SIGTERM to SIGKILL when the command ends for good."""
    save_grace: timedelta = timedelta()
    """The part of it, after a signal to the launcher, in which the ranks train on until a checkpoint is durable."""
    rolls_back: bool = False
    """Whether the job goes back to a sound state when a loss is not a number."""
    reports_spikes: bool = False
    """Whether spikes of the loss and of the gradient norm are reported."""
    watch: str = ""
    """The folder to which the script saves by itself; empty for none."""
    log_max_bytes: int = 64 * 1024 * 1024
    """Size at which the log is rotated."""
    warm_starts: bool = True
    """Whether ranks start from a process that has already imported torch, if that makes no difference to them."""
    stdout: bool = False
    """Whether the command's output is also copied to the launcher's own stdout."""

    @property
    def nodes(self) -> str:
        """The node count in the format of torchrun's `--nnodes`."""
        return str(self.max_nodes) if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"

    @property
    def socket(self) -> Path:
        return self.run_directory / AGENT_SOCKET

    @property
    def logs(self) -> Path:
        return self.run_directory / LOGS

    @property
    def progress(self) -> Path:
        return self.run_directory / PROGRESS

    @property
    def errors(self) -> Path:
        return self.run_directory / ERRORS


def load_config(environment: Mapping[str, str] = os.environ) -> LauncherConfig:
    """Reads the file that `PERDURE_LAUNCHER_CONFIG` names.

    Raises:
        ConfigError: if there is no such file, or a field is wrong.
    """
    path = environment.get(CONFIG_VARIABLE)
    directory = environment.get(RUN_DIRECTORY_VARIABLE)
    if not path:
        raise ConfigError(f"{CONFIG_VARIABLE} is not set: it names the launcher's JSON configuration file")
    if not directory:
        raise ConfigError(f"{RUN_DIRECTORY_VARIABLE} is not set: it names the folder shared with the agent")
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{CONFIG_VARIABLE}={path}: cannot be read as JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(fields).__name__}")
    return parse_config(cast("dict[str, Any]", fields), run_directory=Path(directory))


def parse_config(fields: dict[str, Any], *, run_directory: Path) -> LauncherConfig:
    """Validates the fields. Unknown fields are ignored: a newer backend may start an older launcher.

    Raises:
        ConfigError: if a field is missing or wrong.
    """
    command = fields.get("command")
    if not isinstance(command, list) or not command or not _all_text(cast("list[Any]", command)):
        raise ConfigError(f'command: expected a list of words such as ["torchrun", "train.py"], found {command!r}')
    env = fields.get("env", {})
    if not isinstance(env, dict) or not _all_text(cast("dict[str, Any]", env).values()):
        raise ConfigError("env: expected names with text values")
    secrets = fields.get("secrets", [])
    if not isinstance(secrets, list) or not _all_text(cast("list[Any]", secrets)):
        raise ConfigError(f"secrets: expected a list of names of variables, found {secrets!r}")
    rendezvous = fields.get("rendezvous", "auto")
    if rendezvous not in _RENDEZVOUS:
        raise ConfigError(f"rendezvous: expected one of {', '.join(_RENDEZVOUS)}, found {rendezvous!r}")
    run_id = fields.get("run_id")
    if not isinstance(run_id, str) or not re.fullmatch(r"[A-Za-z0-9_.-]+", run_id):
        raise ConfigError(f"run_id: expected letters, digits, '-', '_' and '.' (it names folders), found {run_id!r}")
    if len(os.fsencode(run_directory / AGENT_SOCKET)) > LONGEST_SOCKET_PATH:
        raise ConfigError(
            f"{RUN_DIRECTORY_VARIABLE}={run_directory}: too long, since the path of {AGENT_SOCKET} in it may have "
            f"{LONGEST_SOCKET_PATH} bytes; choose a shorter folder"
        )
    min_nodes, max_nodes = _nodes(fields.get("nodes", "1"))
    workdir = fields.get("workdir")
    return LauncherConfig(
        command=tuple(cast("list[str]", command)),
        run_id=run_id,
        run_directory=run_directory,
        workdir=Path(workdir) if workdir else None,
        env=cast("dict[str, str]", env),
        secrets=tuple(cast("list[str]", secrets)),
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        role=str(fields.get("role") or ""),
        slot=_slot(fields.get("slot", 0)),
        port=_port(fields.get("port")),
        processes=_processes(fields.get("processes", "gpu")),
        rendezvous=rendezvous,
        address=str(fields.get("address") or "127.0.0.1"),
        store_ports=_store_ports(fields.get("store_ports")),
        stop_grace=_seconds(fields, "stop_grace_s", 2.0),
        termination_grace=_seconds(fields, "termination_grace_s", 30.0),
        save_grace=_seconds(fields, "save_grace_s", 0.0),
        rolls_back=bool(fields.get("rolls_back", False)),
        reports_spikes=bool(fields.get("reports_spikes", False)),
        watch=str(fields.get("watch") or ""),
        log_max_bytes=_log_size(fields.get("log_max_bytes", 64 * 1024 * 1024)),
        warm_starts=bool(fields.get("warm_starts", True)),
        stdout=bool(fields.get("stdout", False)),
    )


def _all_text(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _nodes(value: Any) -> tuple[int, int]:
    match = _NODES.fullmatch(str(value))
    minimum = int(match[1]) if match else 0
    maximum = int(match[2] or match[1]) if match else 0
    if not 1 <= minimum <= maximum:
        raise ConfigError(f"nodes: expected a number such as 4, or min:max such as 2:4, found {value!r}")
    return minimum, maximum


def _processes(value: Any) -> int | None:
    if value in ("gpu", "auto", None):
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ConfigError(f'processes: expected "gpu" or a number of at least 1, found {value!r}')


def _port(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST_PORT):
        return value
    raise ConfigError(f"port: expected a number from 1 to {_LARGEST_PORT}, found {value!r}")


def _slot(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ConfigError(f"slot: expected a number of at least 0, found {value!r}")


def _store_ports(value: Any) -> range | None:
    try:
        return None if value is None else parse_ports(str(value))
    except ValueError:
        raise ConfigError(f"store_ports: expected a range of ports such as 29500-29599, found {value!r}") from None


def _seconds(fields: dict[str, Any], name: str, default: float) -> timedelta:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise ConfigError(f"{name}: expected seconds, 0 or more, found {value!r}")
    return timedelta(seconds=value)


def _log_size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 4096:
        raise ConfigError(f"log_max_bytes: expected at least 4096 bytes, found {value!r}")
    return value
