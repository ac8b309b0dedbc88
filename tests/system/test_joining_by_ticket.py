"""Test of machines that reach only a gateway: the command line, the gateway's process, agents and ranks are real."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
from pydantic import SecretStr

from perdure.base.credentials.certificates import Authority
from perdure.client.connection import payload_encryption
from perdure.contract import JobPhase
from perdure.join.ticket_file import TicketFile
from tests.support.command_line import PERDURE
from tests.support.temporal_server import free_port
from tests.support.waiting import eventually
from tests.system.joined import Machines, Process, machines
from tests.system.site import SCRIPT, Site

NO_TEMPORAL = {"TEMPORAL_ADDRESS": "", "TEMPORAL_NAMESPACE": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Machines]:
    """Machines that are given neither an address of Temporal nor a key."""
    async with machines(tmp_path, NO_TEMPORAL) as here:
        yield here


def connects_to(process: Process, port: int) -> bool:
    """Whether a command or one of its processes has a connection to this port."""
    top = psutil.Process(process.popen.pid)
    for each in (top, *top.children(recursive=True)):
        # Some of a training's processes are short.
        with suppress(psutil.NoSuchProcess):
            if any(one.raddr and one.raddr.port == port for one in each.net_connections()):
                return True
    return False


@pytest.mark.long("joining")
async def test_a_machine_with_a_ticket_trains_and_survives_a_kill_of_the_gateway(
    site: Site, here: Machines, tmp_path: Path
) -> None:
    endpoint = site.client.endpoint
    temporal = {"TEMPORAL_ADDRESS": endpoint.address, **payload_encryption(endpoint).environment}
    address, keyring = f"127.0.0.1:{free_port()}", tmp_path / "keyring"

    async def gateway() -> Process:
        process = here.start(*PERDURE, "gateway", "--listen", address, "--keyring", str(keyring), environment=temporal)
        await eventually(lambda: "serving agents" in process.text, what=lambda: f"a gateway, but {process.text}")
        return process

    first = await gateway()
    assert (keyring.stat().st_mode & 0o777, (keyring / "ca.key").stat().st_mode & 0o777) == (0o700, 0o600)
    job = await site.submit(nodes="1", script=SCRIPT, backend="joined")
    ticket = here.start(
        *(*PERDURE, "ticket", job.name, "--gateway", f"https://{address}", "--authority", str(keyring / "ca.crt")),
        environment=temporal,
    )
    assert await ticket.leave() == 0
    path = tmp_path / f"{job.name}.ticket"
    assert path.stat().st_mode & 0o777 == 0o600
    secret = json.loads(path.read_text())["secret"]
    assert secret not in ticket.text
    node = here.join(job.name, "a", "--ticket", str(path))
    known = await job.running(nodes=1)
    await job.stepping(generation=known.generation, ranks=1)

    temporal_port = int(endpoint.address.rpartition(":")[2])
    assert connects_to(node, int(address.rpartition(":")[2]))
    assert not connects_to(node, temporal_port)
    for process in job.processes():
        try:
            environment = process.environ()
        except psutil.NoSuchProcess:
            continue
        assert not any(
            value for name, value in environment.items() if name.startswith(("TEMPORAL_", "PERDURE_PAYLOAD"))
        )
        assert secret not in environment.values()

    first.popen.kill()
    first.popen.wait()
    await job.undisturbed(ranks=1, seconds=2)
    await gateway()
    await job.undisturbed(ranks=1, seconds=2)
    assert await job.incidents() == []
    job.finish()
    assert await node.leave() == 0
    assert "SUCCEEDED" in node.text
    assert (await site.client.wait(job.name)).phase is JobPhase.SUCCEEDED


@pytest.mark.long("joining")
async def test_what_is_wrong_with_a_ticket_is_said(site: Site, here: Machines, tmp_path: Path) -> None:
    for arguments, code, words in (
        (("--gateway", "https://127.0.0.1:1"), 2, "requires a ticket"),
        (("--ticket", "missing"), 2, "cannot be read"),
        (("--ticket", str(written(tmp_path, job="another"))), 2, "is a ticket of the job another"),
        (("--ticket", str(written(tmp_path)), "--gateway", "http://127.0.0.1:1"), 2, "expected HOST:PORT"),
        (("--ticket", str(written(tmp_path))), 6, "does not answer"),
        (("--ticket", str(written(tmp_path)), "--nodes", "2"), 2, "that its owner has started"),
    ):
        done = here.join("some-job", "a", *arguments)
        assert await done.leave() == code, done.text
        assert words in " ".join(done.text.replace("│", " ").split()), done.text
    local = await site.submit(nodes="1", script=SCRIPT)
    environment = {"TEMPORAL_ADDRESS": site.client.endpoint.address}
    environment |= payload_encryption(site.client.endpoint).environment
    refused = here.start(
        *(*PERDURE, "ticket", local.name, "--authority", str(written(tmp_path))), environment=environment
    )
    assert await refused.leave() == 2
    assert "tickets are for jobs with backend: joined" in refused.text
    unknown = here.start(*PERDURE, "ticket", local.name, environment=environment)
    assert await unknown.leave() == 2
    assert "no worker of this site says how machines reach its gateway" in unknown.text


def written(folder: Path, job: str = "some-job") -> Path:
    """A ticket, of a gateway that does not run."""
    port = free_port()
    path = folder / f"{job}.{port}.ticket"
    TicketFile(
        job=job,
        namespace="default",
        id="0" * 12,
        secret=SecretStr("0" * 64),
        nodes=1,
        expires_at=datetime.now(UTC),
        gateway=f"127.0.0.1:{port}",
        authority=Authority.new().certificate,
    ).write(path)
    return path
