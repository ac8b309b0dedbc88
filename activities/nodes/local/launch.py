"""Starts the two processes of a local node with their configurations, environments and commands."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import perdure.base
from perdure.activities.nodes.backend import NodeRefused
from perdure.activities.nodes.configurations import agent_configuration, launcher_configuration
from perdure.activities.nodes.local import spawn
from perdure.activities.nodes.local.folders import FolderOwner, NodeFolder
from perdure.agent.config import CONFIG_VARIABLE as AGENT_CONFIG_VARIABLE
from perdure.agent.config import AgentConfig
from perdure.base.backoff import Backoff
from perdure.base.errors import SecretUnavailable
from perdure.base.log_format import FORMAT_VARIABLE, configured_format
from perdure.base.secret_store import SecretStore
from perdure.contract import NodeRequest
from perdure.spec.capabilities import LOOPBACK

_SPAWN_TIMEOUT = 60.0
_SECRETS = "secrets.json"


def agent_backoff() -> Backoff:
    """Returns the pauses before a crashing agent is started again; one that ran for half a minute begins anew."""
    return Backoff(0.2, 30.0)


class SpawnFailed(Exception):
    """The launcher or the agent could not be started; a retry may succeed."""


def refuse_impossible(request: NodeRequest) -> None:
    """Checks the parts of a request that only this machine can check.

    Raises:
        NodeRefused: if the node can never run here.
    """
    try:
        SecretStore().environment(request.spec.secrets)
    except SecretUnavailable as error:
        raise NodeRefused(f"{error}. {error.remedy}".rstrip(". ")) from error
    workdir = request.spec.workdir
    if workdir is None:
        return
    if not Path(workdir.path).is_dir():
        raise NodeRefused(
            f"workdir.path is {workdir.path!r}, which is not a folder on {socket.gethostname()}; "
            "set it to one that exists where the worker runs"
        )


def write_configurations(
    folder: NodeFolder, request: NodeRequest, agent: AgentConfig | None = None, *, stdout: bool = False
) -> FolderOwner:
    """Writes the files that starting the node requires; `node.json` comes last and marks the folder as complete.

    Args:
        folder: the node's folder.
        request: the node.
        agent: its agent's configuration; by default that of a local node.
        stdout: whether the launcher also copies the command's output to its own standard output.
    """
    if agent is None:
        agent = agent_configuration(request, address=LOOPBACK, host=socket.gethostname(), run_dir=folder.run_dir)
    agent = agent.model_copy(update={"machine_dir": folder.checks_of_machine})
    workdir = request.spec.workdir
    place = (workdir.path if workdir else None) or os.getcwd()
    launcher = launcher_configuration(request, address=agent.address, workdir=place) | {"stdout": stdout}
    folder.log.parent.mkdir(parents=True, exist_ok=True)
    folder.write("agent.json", agent.model_dump_json(indent=1))
    folder.write("launcher.json", json.dumps(launcher, indent=1))
    # The values of the secrets stay where they are.
    folder.write(_SECRETS, json.dumps(dict(request.spec.secrets)))
    record = FolderOwner.of(request)
    folder.write("node.json", record.model_dump_json(indent=1))
    return record


def secret_variables(folder: NodeFolder) -> dict[str, str]:
    """Returns the variables with their values, for the launcher's environment only.

    Raises:
        SecretUnavailable: if this machine lacks one.
    """
    path = folder.path / _SECRETS
    # An earlier release has written none.
    return SecretStore().environment(json.loads(path.read_text())) if path.exists() else {}


def start_launcher(folder: NodeFolder, record: FolderOwner) -> subprocess.Popen[bytes]:
    """Begins to start the launcher; `finish` waits for the start.

    Raises:
        SpawnFailed: if a secret of the job is not on this machine any more.
    """
    try:
        environment = common_environment(folder, record) | secret_variables(folder)
    except SecretUnavailable as error:
        raise SpawnFailed(str(error)) from error
    environment["PERDURE_LAUNCHER_CONFIG"] = str(folder.path / "launcher.json")
    # `torchrun` must be the one beside this interpreter, as in an activated environment.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    workdir = json.loads((folder.path / "launcher.json").read_text())["workdir"]
    return _start(
        folder.launcher_file,
        output=folder.path / "launcher.log",
        directory=workdir,
        module="perdure_launcher",
        environment=environment,
    )


def start_agent(folder: NodeFolder, record: FolderOwner, connection: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Begins to start the agent, with `connection` overriding the worker's Temporal variables; `finish` waits for the
    start."""
    return _start(
        folder.agent_file,
        output=folder.path / "agent.out",
        directory=folder.path,
        module="perdure.agent",
        environment=agent_environment(folder, record, connection),
    )


def finish(*starting: subprocess.Popen[bytes]) -> None:
    """Waits until the processes run.

    Raises:
        SpawnFailed: if one does not.
    """
    problems: list[str] = []
    for process in starting:
        _, error = process.communicate(timeout=_SPAWN_TIMEOUT)
        if process.returncode:
            problems.append(error.decode(errors="replace").strip() or f"the starter exited with {process.returncode}")
    if problems:
        raise SpawnFailed("; ".join(problems))


def program(module: str) -> list[str]:
    """Returns the command that runs one of Perdure's modules."""
    # -P: the working directory must not be searched for imports.
    return [sys.executable, "-P", "-m", module]


def agent_environment(folder: NodeFolder, record: FolderOwner, connection: Mapping[str, str]) -> dict[str, str]:
    """Returns the agent's environment, with `connection` overriding this process's Temporal variables."""
    environment = common_environment(folder, record) | dict(connection)
    environment[AGENT_CONFIG_VARIABLE] = str(folder.path / "agent.json")
    environment[FORMAT_VARIABLE] = configured_format()
    # Perdure comes before a package of its name on a user's PYTHONPATH.
    home = str(Path(perdure.base.__path__[0]).parents[1])
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([home, inherited]) if inherited else home
    return environment


def common_environment(folder: NodeFolder, record: FolderOwner) -> dict[str, str]:
    """Returns this process's environment, plus the variables that identify the node."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
    return environment | {"PERDURE_RUN_DIR": str(folder.run_dir), "PERDURE_NODE": record.mark}


def _start(
    identity: Path, *, output: Path, directory: Path | str, module: str, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    starter = [sys.executable, "-I", "-S", spawn.__file__, str(identity), str(output), str(directory), *program(module)]
    return subprocess.Popen(
        starter, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
