"""Test of a server that works while the others idle, on a machine that is busy with other work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from examples.demo.learning import free_ports
from perdure.client.hot_nodes import find_hot_nodes
from tests.support.waiting import eventually
from tests.system.site import WALK, Site
from tests.system.test_job_of_roles import PROGRAMS


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Each processor has two processes that compute all the time."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    yield
    for process in processes:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


@pytest.mark.long("roles")
@pytest.mark.usefixtures("busy_machine")
async def test_a_server_whose_child_computes_all_the_time_is_named_on_a_busy_machine(site: Site) -> None:
    out = site.folder / "hot"
    out.mkdir()
    (out / "prepared").touch()
    job = await site.submit(
        out=out,
        recovery={"warm_starts": False},
        roles={
            "trainer": {"nodes": 1, "command": [sys.executable, str(WALK), str(out)], "depends_on": {"ps": "ready"}},
            "ps": {
                "nodes": 3,
                "command": [sys.executable, str(PROGRAMS), "serve-hot", str(out)],
                "ready": {"port": free_ports(3)},
            },
        },
    )

    async def named() -> tuple[str, ...]:
        return await find_hot_nodes(site.client, await job.status())

    (words,) = await eventually(named, what="a hot server")
    print(words)
    assert words.startswith("ps node 1 is hot: ")
