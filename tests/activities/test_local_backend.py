"""Tests of the local backend with real launchers and agents: its promises when any process dies at any point."""

from __future__ import annotations

import asyncio
import os
import resource
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from perdure.activities.nodes.backend import NodeRefused
from perdure.activities.nodes.local import launch as launching
from perdure.activities.nodes.local.backend import LocalBackend
from perdure.activities.nodes.local.folders import NodeFolder
from perdure.base.state_folder import default_path
from perdure.contract import NodeEventKind
from tests.activities.local_nodes import NOWHERE, LocalJob, nothing_left, run_at_once
from tests.support.waiting import eventually
from tests.support.watching import watching

RUNNING, GONE, PENDING = NodeEventKind.RUNNING, NodeEventKind.GONE, NodeEventKind.PENDING


@pytest.fixture
def backend(state: Path) -> LocalBackend:
    return LocalBackend(state, connection=NOWHERE)


@pytest.fixture
async def job(state: Path) -> AsyncIterator[LocalJob]:
    async with nothing_left(LocalJob(state)) as made:
        yield made


async def test_one_node_however_often_it_is_created(state: Path, backend: LocalBackend, job: LocalJob) -> None:
    other = LocalBackend(state, connection=NOWHERE)
    request = job.request()
    created = await asyncio.gather(*(one.create(request) for one in (backend, other, backend, other)))
    assert {one.name for one in created} == {request.name}
    assert not any(one.pending for one in created)
    await eventually(lambda: job.pids("sleep 600"))
    assert len(job.pids("-m perdure_launcher")) == 1
    assert len(job.pids("-m perdure.agent")) == 1
    described = await backend.describe(job.ref())
    assert described is not None
    assert described.kind is RUNNING
    assert (job.folder() / "agent.json").stat().st_mode & 0o077 == 0


async def test_a_killed_launcher_is_a_node_that_is_gone(backend: LocalBackend, state: Path) -> None:
    # A daemon of its own session, which survives its launcher.
    script = f"{shlex.quote(sys.executable)} -c 'import os, time; os.setsid(); time.sleep(601)' & sleep 600"
    async with nothing_left(LocalJob(state, run_at_once("bash", "-c", script))) as job:
        async with watching(backend, job.watch()) as watch:
            await backend.create(job.request())
            await watch.until(RUNNING)
            await eventually(lambda: job.pids("sleep(601)"))
            [launcher] = job.pids("-m perdure_launcher")
            killed = time.time()
            os.kill(launcher, signal.SIGKILL)
            gone = await watch.until(GONE)
            print(f"noticed and cleaned up in {watch.heard[-1] - killed:.3f} s")
            assert "killed" in gone.reason
            assert not [command for command in job.processes().values() if "-m perdure.agent" not in command]
            await eventually(lambda: not job.processes())
        # It has ended: creating it again starts nothing, and a new watch reports that.
        await backend.create(job.request())
        assert not job.processes()
        described = await backend.describe(job.ref())
        assert described is not None
        assert described.kind is GONE
        async with watching(backend, job.watch()) as watch:
            await watch.until(GONE)
            assert watch.kinds() == [GONE]


async def test_a_launcher_that_leaves_says_how(backend: LocalBackend, job: LocalJob) -> None:
    async with watching(backend, job.watch()) as watch:
        await backend.create(job.request())
        await watch.until(RUNNING)
        await eventually(lambda: job.pids("sleep 600"))
        os.kill(job.pids("-m perdure_launcher")[0], signal.SIGTERM)
        gone = await watch.until(GONE)
        assert gone.reason == "the launcher received SIGTERM"


async def test_an_agent_is_restarted_beside_its_launcher(backend: LocalBackend, job: LocalJob) -> None:
    async with watching(backend, job.watch()) as watch:
        await backend.create(job.request())
        await watch.until(RUNNING)
        launcher = job.pids("-m perdure_launcher")
        for _ in range(2):
            [agent] = await eventually(lambda: job.pids("-m perdure.agent"))
            os.kill(agent, signal.SIGKILL)
            await eventually(
                lambda agent=agent: agent not in job.pids("-m perdure.agent") and job.pids("-m perdure.agent")
            )
        assert job.pids("-m perdure_launcher") == launcher
        assert watch.kinds() == [RUNNING]


async def test_deletion_ends_everything_and_is_final(backend: LocalBackend, state: Path) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    async with nothing_left(LocalJob(state, run_at_once(sys.executable, "-c", stubborn))) as job:
        async with watching(backend, job.watch()) as watch:
            await backend.create(job.request())
            await watch.until(RUNNING)
            await eventually(lambda: job.pids("SIG_IGN"))
            await backend.delete(job.ref(grace=0.5))
            assert not job.processes()
            assert (await watch.until(GONE)).reason == "deleted"
            await backend.delete(job.ref())
            await backend.create(job.request())
            assert not job.processes()
        assert (job.folder() / "agent.json").exists()


async def test_a_create_that_comes_after_its_deletion_starts_nothing(backend: LocalBackend, job: LocalJob) -> None:
    await backend.delete(job.ref())
    assert await backend.describe(job.ref()) is None
    await backend.create(job.request())
    assert not job.processes()
    await backend.create(job.request(incarnation=2))
    assert job.processes()


async def test_a_node_without_a_slot_waits_for_one(backend: LocalBackend, job: LocalJob, state: Path) -> None:
    (state / "capacity").write_text("1\n")
    async with watching(backend, job.watch()) as watch:
        assert not (await backend.create(job.request(0))).pending
        assert (await backend.create(job.request(1))).pending == "no free slot: 1 of 1 in use"
        assert (await backend.create(job.request(2))).pending
        pending = await watch.until(PENDING, rank=1)
        assert pending.reason == "no free slot: 1 of 1 in use"
        await watch.until(PENDING, rank=2)
        # One that waits can be deleted, and then never starts.
        await backend.delete(job.ref(1))
        await watch.until(GONE, rank=1)
        await backend.delete(job.ref(0))
        await watch.until(RUNNING, rank=2)
        assert RUNNING not in watch.kinds(1)


async def test_a_full_disk_hides_no_end_and_stops_no_deletion(backend: LocalBackend, job: LocalJob) -> None:
    async with watching(backend, job.watch()) as watch:
        await asyncio.gather(backend.create(job.request(0)), backend.create(job.request(1)))
        await watch.until(RUNNING, rank=0)
        await watch.until(RUNNING, rank=1)
        await eventually(lambda: len(job.pids("-m perdure_launcher")) == 2)
        with no_writes():
            [first] = [pid for pid in job.pids("-m perdure_launcher") if _works_for(pid, job.folder(0))]
            os.kill(first, signal.SIGKILL)
            await watch.until(GONE, rank=0)
            await backend.delete(job.ref(1))
            await watch.until(GONE, rank=1)
            await eventually(lambda: not job.processes())


def _works_for(pid: int, folder: Path) -> bool:
    return f"PERDURE_RUN_DIR={folder}/run".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


@contextmanager
def no_writes() -> Iterator[None]:
    """Makes every write of this process to a file fail, as a full disk does; the test runner's own output too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_nodes_outlive_the_worker_that_created_them(backend: LocalBackend, job: LocalJob, state: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from perdure.activities.nodes.local.backend import LocalBackend\n"
        "from perdure.contract import NodeRequest\n"
        "request = NodeRequest.model_validate_json(sys.stdin.read())\n"
        f"asyncio.run(LocalBackend(Path({str(state)!r}), connection={NOWHERE!r}).create(request))\n"
        "print('created', flush=True)\n"
        "import time; time.sleep(600)\n"
    )
    worker = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert worker.stdin
    assert worker.stdout
    worker.stdin.write(job.request().model_dump_json().encode())
    worker.stdin.close()
    assert await asyncio.wait_for(worker.stdout.readline(), 60) == b"created\n"
    before = await eventually(lambda: job.processes() if job.pids("sleep 600") else None)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(worker.pid, number)
        except ProcessLookupError:
            break
    await worker.wait()
    async with watching(backend, job.watch()) as watch:
        await watch.until(RUNNING)
        assert job.processes().keys() == before.keys()
        os.kill(job.pids("-m perdure_launcher")[0], signal.SIGKILL)
        await watch.until(GONE)


async def test_a_crash_between_the_steps_is_repaired(backend: LocalBackend, job: LocalJob, state: Path) -> None:
    # Laid down, and nothing started.
    first = NodeFolder(job.folder(0))
    first.make()
    launching.write_configurations(first, job.request(0))
    # The launcher started, and no agent.
    second = NodeFolder(job.folder(1))
    second.make()
    record = launching.write_configurations(second, job.request(1))
    launching.finish(launching.start_launcher(second, record))
    [launcher] = await eventually(lambda: job.pids("-m perdure_launcher"))
    async with watching(backend, job.watch()) as watch:
        await watch.until(RUNNING, rank=0)
        await watch.until(RUNNING, rank=1)
        await eventually(lambda: len(job.pids("-m perdure.agent")) == 2)
    assert launcher in job.pids("-m perdure_launcher")
    # A process that is starting another has the command line of the first, too.
    await eventually(lambda: len(job.pids("-m perdure_launcher")) == 2)


async def test_a_launcher_that_died_unwatched_is_settled_by_the_next_watch(
    backend: LocalBackend, job: LocalJob
) -> None:
    await backend.create(job.request())
    await eventually(lambda: job.pids("sleep 600"))
    os.kill(job.pids("-m perdure_launcher")[0], signal.SIGKILL)
    async with watching(backend, job.watch()) as watch:
        await watch.until(GONE)
        await eventually(lambda: not job.processes())
        assert RUNNING not in watch.kinds() or watch.kinds() == [RUNNING, GONE]


async def test_a_watch_sees_its_own_group_only(backend: LocalBackend, job: LocalJob, state: Path) -> None:
    async with nothing_left(LocalJob(state)) as other:
        await backend.create(job.request(0))
        await backend.create(job.request(128))
        await backend.create(other.request(0))
        async with watching(backend, job.watch(group=1)) as watch:
            await watch.until(RUNNING, rank=128)
            assert {event.rank for event in watch.events} == {128}


async def test_a_long_state_folder_still_has_short_sockets_and_a_users_folder_does_not_shadow_our_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, users = tmp_path / ("deep" * 20), tmp_path / "users"
    users.mkdir()
    for name in ("agent", "workflows", "perdure", "json", "perdure_launcher"):
        (users / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    monkeypatch.setenv("PERDURE_GENERATION", "7")
    async with nothing_left(LocalJob(state, workdir={"path": str(users)})) as job:
        await LocalBackend(state, connection=NOWHERE).create(job.request())
        await eventually((job.folder() / "run" / "agent.sock").exists)
        await eventually(lambda: job.agent_state().get("mode"))
        [command] = job.pids("sleep 600")
        assert Path(f"/proc/{command}/cwd").readlink() == users
        assert b"PERDURE_GENERATION=7" not in Path(f"/proc/{command}/environ").read_bytes()


async def test_what_can_never_run_is_refused_with_its_field(backend: LocalBackend, state: Path) -> None:
    missing = LocalJob(state, workdir={"path": "/no/such/folder"})
    with pytest.raises(NodeRefused, match=r"workdir\.path is '/no/such/folder'"):
        await backend.create(missing.request())
    assert not (state / "nodes").exists()


def test_the_state_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PERDURE_STATE", str(tmp_path / "here"))
    assert default_path() == tmp_path / "here"
    monkeypatch.delenv("PERDURE_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "perdure"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".local" / "state" / "perdure"
