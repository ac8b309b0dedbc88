"""Runs a node inside of its actor: reads the task from the actor's pipe, and ends when that closes.

Ray gives the resources of a dead actor to others at once, so nothing of a node outlives its actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Generator
from typing import Any

from perdure.activities.nodes.joined.machine import Machine, joined_nodes
from perdure.activities.nodes.joined.node_session import AgentConnection, NodeSession
from perdure.activities.nodes.local.folders import Ending, now
from perdure.activities.nodes.ray.task import NodeTask
from perdure.agent.workdir import WrongArchive, unpack_workdir
from perdure.base.errors import SecretUnavailable
from perdure.contract import NodeRequest


async def _run(task: NodeTask, messages: asyncio.StreamReader) -> Ending:
    host = socket.gethostname()
    machine = Machine(node_id=task.request.name, host=host, address=task.machine.address, rack=task.machine.rack)
    connection = AgentConnection(environment=task.environment, gateway=task.gateway, token=task.token)
    try:
        with _code(task) as request:
            session = NodeSession(request, machine, connection=connection)
            following = asyncio.create_task(_follow(session, messages))
            try:
                return await session.run()
            finally:
                following.cancel()
    except (OSError, WrongArchive, SecretUnavailable) as error:
        return Ending(time=now(), reason=f"{host}: {error}")


@contextlib.contextmanager
def _code(task: NodeTask) -> Generator[NodeRequest]:
    """Unpacks the job's code beside the node's files, and yields the request with its folder. The code goes with the
    node: the machine stays, and has other nodes."""
    request, parts = task.request, task.machine.parts
    workdir = request.spec.workdir
    if parts is None or workdir is None or workdir.archive is None:
        yield request
        return
    folder = joined_nodes().folder(request.name).path / "workdir"
    try:
        joined_nodes().folder(request.name).make()
        try:
            unpack_workdir(parts, workdir.archive.digest, folder)
        finally:
            shutil.rmtree(parts, ignore_errors=True)
        there = workdir.model_copy(update={"path": str(folder)})
        yield request.model_copy(update={"spec": request.spec.model_copy(update={"workdir": there})})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _forget_old_nodes() -> None:
    """Deletes the folders of nodes that ended on this machine longer ago than the retention: nothing else does."""
    with contextlib.suppress(OSError, ValueError):
        joined_nodes().remove_unwatched()


async def _follow(session: NodeSession, messages: asyncio.StreamReader) -> None:
    while line := await messages.readline():
        message: dict[str, Any] = json.loads(line)
        session.stop(message["reason"], save=message["save"])
    await session.kill()


async def _main(ending: int) -> None:
    # What starts from here on gives way to others, as the actor does, which has let this process import first.
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))
    messages = asyncio.StreamReader(limit=2**22)
    protocol = asyncio.StreamReaderProtocol(messages)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    if line := await messages.readline():
        found = await _run(NodeTask.model_validate_json(line), messages)
        os.write(ending, found.model_dump_json().encode())
        _forget_old_nodes()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
