"""A node on this machine from its first report to its shutdown report: runs launcher and agent as child processes.

With other backends a node outlives the process that started it. Here the foreground process is the node, as far as its
scheduler knows, so nothing outlives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from perdure.activities.nodes.configurations import agent_configuration
from perdure.activities.nodes.joined import child
from perdure.activities.nodes.joined.machine import Machine, joined_nodes
from perdure.activities.nodes.local import launch
from perdure.activities.nodes.local.folders import Ending, FolderOwner, NodeFolder, now
from perdure.activities.nodes.local.processes import kill_leftovers
from perdure.agent.config import GatewayConnection, GatewayRights
from perdure.contract import NodeRequest
from perdure_launcher.system.user_signals import REQUESTS
from perdure_training.node_api.layout import AGENT_SOCKET
from perdure_training.snapshots.copies import RACK_VARIABLE

logger = logging.getLogger(__name__)

_AGENT_GRACE = 5.0
"""Seconds that an agent has to send its shutdown report and undelivered failures."""
_ASKING = 2.0
"""Seconds for the request that informs the agent of the node's departure, which does not depend on it."""


@dataclass(frozen=True, kw_only=True)
class AgentConnection:
    """How the agent of a node reaches the control plane."""

    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Temporal's variables; they override those of this process."""
    gateway: GatewayRights | None = None
    """Set: the agent connects to the gateway, and has no Temporal."""
    token: SecretStr | None = None
    """The machine's own, whose digest is in the grant, and which proves its rights at the gateway."""


class NodeSession:
    """One incarnation of a node on this machine."""

    def __init__(self, request: NodeRequest, machine: Machine, *, connection: AgentConnection) -> None:
        """Prepares the node; `run` starts it.

        Args:
            request: the node slot that the job assigned.
            machine: this machine.
            connection: of its agent.
        """
        self._request = request
        self._machine = machine
        self._connection = connection
        self._folder: NodeFolder = joined_nodes().folder(request.name)
        self._started = asyncio.Event()
        self._launcher: Process | None = None
        self._agent: Process | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._reason = ""

    @property
    def log(self) -> Path:
        """The path of the command's output."""
        return self._folder.log

    def stop(self, reason: str, *, save: bool = True) -> None:
        """Ends the command with the job's grace period; `run` then returns.

        A job that stores checkpoints makes one before, unless it is called again.

        Args:
            reason: for users.
            save: whether that checkpoint is made.
        """
        self._reason = self._reason or reason
        if self._leaving is None or self._leaving.done():
            self._leaving = asyncio.create_task(self._leave(reason, save=save and self._leaving is None))

    def pass_on(self, number: signal.Signals) -> None:
        """Has the launcher send a signal to the ranks that handle it."""
        if self._launcher is not None and self._launcher.returncode is None:
            self._launcher.send_signal(REQUESTS[number])

    async def kill(self) -> None:
        """Ends all processes of the command at once; `run` then returns."""
        await self._started.wait()
        if self._launcher is not None and self._launcher.returncode is None:
            self._launcher.kill()

    async def _leave(self, reason: str, *, save: bool) -> None:
        # The node starts sooner without.
        import aiohttp

        # The agent learns first: it would report an unexpected end as a failure, and the job would repair the node
        # here.
        timeout = aiohttp.ClientTimeout(total=_ASKING)
        connector = aiohttp.UnixConnector(str(self._folder.run_dir / AGENT_SOCKET))
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
                await session.post("http://node/v1/leave", json={"reason": reason, "save": save})
        await self._started.wait()
        if self._launcher is not None and self._launcher.returncode is None:
            self._launcher.terminate()

    async def run(self) -> Ending:
        """Runs the node until none of its processes is left, and returns how it ended.

        Raises:
            OSError: if its files cannot be written or its processes cannot be started.
            SecretUnavailable: if this machine lacks a secret that the job names.
        """
        record = self._lay_down()
        self._launcher = launcher = await self._start_launcher(record)
        self._started.set()
        keeping = asyncio.create_task(self._keep_agent(record))
        try:
            code = await launcher.wait()
        finally:
            keeping.cancel()
            await asyncio.wait((keeping,))
        if leftovers := await kill_leftovers(record.mark, run_dir=self._folder.run_dir):
            logger.info("ended %d processes that the launcher had left behind", leftovers)
        await self._end_agent()
        ending = self._read_ending(code)
        try:
            return self._folder.mark_ended(ending)
        except OSError as error:
            logger.error("%s: its end cannot be recorded: %s", self._folder.name, error)
            return ending

    def _lay_down(self) -> FolderOwner:
        """Writes the files that the node's processes read."""
        folder, machine = self._folder, self._machine
        folder.make()
        agent = agent_configuration(
            self._request,
            address=machine.address,
            host=machine.host,
            run_dir=folder.run_dir,
            gateway=self._gateway(),
            metrics_port=machine.metrics_port,
        )
        agent = agent.model_copy(update={"log_path": str(folder.log)})
        return launch.write_configurations(folder, self._request, agent, stdout=True)

    def _gateway(self) -> GatewayConnection | None:
        rights, token = self._connection.gateway, self._connection.token
        if rights is None or token is None:
            return None
        path = self._folder.write("token", token.get_secret_value())
        return GatewayConnection(**dict(rights), token_path=path)

    async def _start_launcher(self, record: FolderOwner) -> Process:
        environment = launch.common_environment(self._folder, record) | launch.secret_variables(self._folder)
        environment["PERDURE_LAUNCHER_CONFIG"] = str(self._folder.path / "launcher.json")
        environment |= self._rack
        # Users may call perdure by its path without activating its environment; torchrun beside it must still be found.
        path, beside = environment.get("PATH", os.defpath), str(Path(sys.executable).parent)
        if beside not in path.split(os.pathsep):
            environment["PATH"] = os.pathsep.join((path, beside))
        # The launcher inherits standard output, which carries the command's output.
        return await self._start(
            "perdure_launcher", environment, output=None, errors=self._folder.path / "launcher.log"
        )

    @property
    def _rack(self) -> dict[str, str]:
        return {RACK_VARIABLE: self._machine.rack} if self._machine.rack else {}

    async def _keep_agent(self, record: FolderOwner) -> None:
        """Starts the agent, and restarts it whenever it ends while its launcher runs."""
        environment = launch.agent_environment(self._folder, record, self._connection.environment) | self._rack
        output = self._folder.path / "agent.out"
        loop = asyncio.get_running_loop()
        backoff = launch.agent_backoff()
        while True:
            began = loop.time()
            try:
                self._agent = await self._start("perdure.agent", environment, output=output, errors=output)
            except OSError as error:
                # Of processes, descriptors or room on a disk there may be too few for a moment.
                logger.warning("the agent cannot be started, which is tried again: %s", error)
            else:
                _prefer(self._agent.pid)
                code = await self._agent.wait()
                logger.warning("the agent exited with %s and is restarted", code)
            await asyncio.sleep(backoff.next_pause(ran=loop.time() - began))

    async def _end_agent(self) -> None:
        agent = self._agent
        if agent is None or agent.returncode is not None:
            return
        agent.terminate()
        try:
            async with asyncio.timeout(_AGENT_GRACE):
                await agent.wait()
        except TimeoutError:
            agent.kill()
            await agent.wait()

    async def _start(
        self, module: str, environment: Mapping[str, str], *, output: Path | None, errors: Path
    ) -> Process:
        with contextlib.ExitStack() as files:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", child.__file__, str(os.getpid()), *launch.program(module)),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=files.enter_context(output.open("ab")) if output else None,
                stderr=files.enter_context(errors.open("ab")),
                # This process handles a terminal's Ctrl-C itself.
                start_new_session=True,
            )

    def _read_ending(self, code: int) -> Ending:
        said = self._folder.launcher_exit
        if said is not None and said.signal is not None and self._reason:
            # The launcher knows no more than that it received the signal.
            return said.model_copy(update={"reason": self._reason})
        if said is not None:
            return said
        if code >= 0:
            return Ending(time=now(), reason=f"its launcher exited with {code}", exit_code=code)
        return Ending(time=now(), reason=f"its launcher was ended by {signal.Signals(-code).name}", signal=-code)


def _prefer(pid: int) -> None:
    """Takes back the niceness that a process has inherited, where the machine allows it. An agent that gets no
    processor loses its lease: Ray gives its workers a niceness of 15, which ranks keep."""
    with contextlib.suppress(OSError):
        if os.getpriority(os.PRIO_PROCESS, pid) > 0:
            os.setpriority(os.PRIO_PROCESS, pid, 0)
