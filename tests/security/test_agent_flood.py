"""Training code that floods its agent's socket: the node keeps its lease, and the agent keeps little of it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.agent.harness import RunningAgent, Workflows, recording, running_agent
from tests.support.temporal_server import DevServer
from tests.support.waiting import DEADLINE

BEATS = 4
"""Heartbeats of the lease while a flood lasts."""

FLOOD = """
import json, os, socket, sys

path, kind = sys.argv[1:]
os.set_blocking(0, False)

def goes_on():
    try:
        return os.read(0, 1) != b""
    except BlockingIOError:
        return True

def post(target, body):
    content = json.dumps(body).encode()
    return f"POST {target} HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: {len(content)}\\r\\n\\r\\n".encode() + content

exits = [{"local_rank": 0, "pid": n, "exit_code": 1} for n in range(8)]
bodies = {
    "usage": lambda n: post("/v1/launcher/usage", {"cpu_cores": n}),
    "hello": lambda n: post("/v1/launcher/hello", {"pid": os.getpid(), "protocol": 1}),
    "failures": lambda n: post("/v1/rendezvous/ready", {"after_generation": n, "ranks": exits, "processes": 1}),
    "finished": lambda n: post("/v1/rendezvous/finished", {"generation": n}),
    "malformed": lambda n: post("/v1/launcher/exited", ["x" * 100]),
    "polls": lambda n: b"GET /v1/launcher/desired?version=0&wait=60 HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n",
    "unfinished": lambda n: post("/v1/launcher/usage", "x" * 1_000_000)[:-100_000],
    "garbage": lambda n: os.urandom(2000),
    "headers": lambda n: b"GET / HTTP/1.1\\r\\n" + b"".join(b"X-%d: y\\r\\n" % i for i in range(5000)),
}

def connect():
    one = socket.socket(socket.AF_UNIX)
    one.setblocking(False)
    try:
        one.connect(path)
    except OSError:
        one.close()
        return None
    return one

offered, attempts, connections, begun = 0, 0, [], False
batch = 1 if kind in ("unfinished", "headers", "polls") else 50
while goes_on():
    while len(connections) < 400 and (one := connect()):
        connections.append(one)
    alive = []
    for one in connections:
        try:
            try:
                if not one.recv(65536):
                    raise ConnectionResetError
            except BlockingIOError:
                pass
            data = b"".join(bodies[kind](attempts + i) for i in range(batch))
            try:
                offered += batch * one.send(data) // len(data)
            except BlockingIOError:
                pass
            attempts += batch
            alive.append(one)
        except OSError:
            one.close()
    if alive and not begun:
        print("floods", flush=True)
    begun, connections = True, alive
print(offered, attempts)
"""


@asynccontextmanager
async def flooded(agent: RunningAgent, kind: str) -> AsyncIterator[asyncio.Task[int]]:
    """Training code floods the socket until the agent has renewed its lease some times; the task returns how many
    requests were offered."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", FLOOD, str(agent.run_dir / "agent.sock"), kind),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )

    async def offered() -> int:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"floods\n"
        await agent.workflows.beats(BEATS)
        assert process.stdin is not None
        process.stdin.close()
        said, _ = await process.communicate()
        return int(said.split()[0])

    task = asyncio.create_task(offered())
    try:
        yield task
    finally:
        if process.returncode is None:
            process.kill()
        await asyncio.wait([task])


@pytest.mark.parametrize(
    "kind",
    [
        "unfinished",
        *(pytest.param(kind, marks=pytest.mark.long("commands")) for kind in ("failures", "polls", "headers")),
        *(pytest.param(kind, marks=pytest.mark.long("commands")) for kind in ("usage", "hello", "finished")),
        *(pytest.param(kind, marks=pytest.mark.long("commands")) for kind in ("malformed", "garbage")),
    ],
)
async def test_the_lease_holds_and_what_the_agent_keeps_is_bounded(
    kind: str, temporal_server: DevServer, tmp_path: Path
) -> None:
    async with recording(temporal_server) as workflows, running_agent(temporal_server, workflows, tmp_path) as agent:
        await agent.launcher_hello()
        await workflows.expect(workflows.group, "joined")
        lease = await agent.start_lease(1)
        await workflows.expect(workflows.group, "lease_taken")
        descriptors: list[int] = []
        async with flooded(agent, kind) as flood:
            while not flood.done():
                descriptors.append(psutil.Process(agent.pid).num_fds())
                # A launcher is answered meanwhile.
                await asyncio.wait_for(agent.get("/v1/launcher/desired?version=-1"), DEADLINE)
            offered = await flood
        assert not lease.done(), "the lease was held all the time"
        # Of a connection it keeps no more than the largest body. Of the 400 that are tried at once it has 64, and a few
        # backlogs of those that it refuses.
        assert max(descriptors) < 200
        logs = sum(path.stat().st_size for path in (tmp_path / "logs").iterdir())
        assert logs < 8 * 2**20
        assert await reports(workflows) <= 1_000
        print(f"{kind}: {offered} requests arrived")
        # A request that never ends is counted as none.
        assert offered > 100 or kind == "unfinished"
        lease.cancel()


async def reports(workflows: Workflows) -> int:
    return len(await workflows.seen(workflows.job)) + len(await workflows.seen(workflows.group))


async def test_a_body_that_is_none_is_refused_and_nothing_else_happens(
    temporal_server: DevServer, tmp_path: Path
) -> None:
    async with recording(temporal_server) as workflows, running_agent(temporal_server, workflows, tmp_path) as agent:
        await agent.launcher_hello()
        before = await agent.get("/v1/launcher/desired?version=-1")
        for target, body, status in (
            ("/v1/launcher/usage", b"x" * 2**21, 413),
            ("/v1/launcher/usage", b"\xff\xfe", 400),
            ("/v1/launcher/usage", b"[" * 500_000, 400),
            ("/v1/launcher/exited", b"{}", 400),
            ("/v1/launcher/exited", json.dumps({"attempt": "1" * 5000}).encode(), 400),
            ("/v1/rendezvous/world?after=x", b"", 405),
            ("/v1/nothing", b"{}", 404),
        ):
            assert await posted(agent, target, body) == status, (target, body[:20])
            assert await agent.get("/v1/launcher/desired?version=-1") == before


async def posted(agent: RunningAgent, target: str, body: bytes) -> int:
    reader, writer = await asyncio.open_unix_connection(str(agent.run_dir / "agent.sock"))
    head = f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.readline()
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return int(answer.split()[1])
