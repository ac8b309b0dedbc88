"""Tests of standbys: a rank starts from a waiting process of its own if a fork would lose a side effect of its
imports."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from perdure.agent.progress import ProgressReader
from perdure_launcher.warm_start.loop import Loop
from perdure_launcher.warm_start.messages import send
from perdure_launcher.warm_start.names import SOCKET, STANDBYS
from perdure_launcher.warm_start.plan import Plan
from perdure_launcher.warm_start.standbys import Standbys, _Standby
from perdure_launcher.warm_start.start_method import has_devices
from perdure_launcher.warm_start.starts import lacks_standbys, read_starts
from tests.launcher.nodes import READY, ROOT, TORCHRUN, Node, all_step, first_world, form_world, running
from tests.launcher.test_warm_starts import gone
from tests.launcher.warmth import Warmth, interpreter_with, warmth
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(300)

PACKAGES = {
    "starts_thread": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    "opens_file": "kept = open('/dev/null')\n",
    "reads_local_rank": "import os\nlocal_rank = os.environ.get('LOCAL_RANK')\n",
    "reads_rank": "import os\nrank = os.environ.get('RANK')\n",
    "reads_port": "import os\nport = os.environ.get('MASTER_PORT')\n",
    "starts_process": "import subprocess\nkept = subprocess.Popen(['sleep', '100'], stdout=-3, stderr=-3)\n",
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return interpreter_with(PACKAGES, tmp_path_factory.mktemp("environment"))


def tell(script: Warmth, *modules: str) -> int:
    """Tells what a rank of this script would tell if it imported these; returns the standby's process."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(script.folder / SOCKET))
        connection.sendall(json.dumps({"learned": {"modules": modules, "changed": {}}}).encode() + b"\n")
    return script.standby()


def test_a_script_sees_the_same_whether_it_was_started_or_waited_for(python: str) -> None:
    with warmth("looks.py", "looks", executable=python) as script:
        script.run("code", "0")
        standby = tell(script, "reads_local_rank")
        warm = script.run()
        assert (script.last.pid, script.last.standby) == (standby, True), script.log()
        assert script.last.reason == "reads_local_rank reads LOCAL_RANK when it is imported"
        cold = script.run(warm=False)
        seen, expected = json.loads(warm.stdout), json.loads(cold.stdout)
        assert {name: seen[name] for name in seen if seen[name] != expected[name]} == {}
        assert (warm.returncode, warm.stderr) == (cold.returncode, cold.stderr)


def test_a_standby_is_tied_to_its_stand_in(python: str) -> None:
    with warmth("looks.py", "looks", executable=python) as script:
        script.run("code", "0")
        standby = tell(script, "reads_local_rank")
        process = script.start("handle")
        assert process.stdout is not None
        assert int(process.stdout.readline()) == standby
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 5

        standby = tell(script, "reads_local_rank")
        process = script.start("wait")
        assert process.stdout is not None
        assert int(process.stdout.readline()) == standby
        ended = os.pidfd_open(standby)
        process.kill()
        assert gone(ended)
        process.wait()


def looked(script: Warmth, **options: Any) -> dict[str, Any]:
    ended = script.run(**options)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_a_standby_has_what_a_fork_would_lose_and_each_use_is_followed_by_another(python: str) -> None:
    lost = ("starts_thread", "opens_file", "reads_local_rank", "reads_rank")
    refused = ("reads_port", "starts_process")
    with warmth("learns.py", *lost, *refused, "reads_rank:rank", executable=python) as script:
        looked(script)
        assert set(script.learn()["left_out"]) <= {*lost, *refused}
        for _ in range(2):
            standby = script.standby()
            seen = looked(script)
            assert script.last.pid == standby, script.log()
            assert script.last.reason == "starts_thread: its import started 1 threads"
            assert {*lost, *refused} & set(seen["ahead"]) == set(lost)
            assert seen["values"] == {"reads_rank:rank": "0"}
        script.standby()
        elsewhere = looked(script, environment={"RANK": "1"})
        assert (script.last.warm, script.last.standby) == (True, False)
        assert elsewhere["values"] == {"reads_rank:rank": "1"}


def test_what_makes_forks_impossible_leads_to_standbys(tmp_path: Path) -> None:
    start = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "sitecustomize.py").write_text(f"import os, threading\nos.write(2, b'users own')\n{start}\n")
    with warmth("looks.py", "code", "6", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}") as script:
        assert script.run().returncode == 6
        assert script.last.reason == "its imports started 1 threads, which a fork would lose", script.log()
        tell(script)
        ended = script.run()
        assert (ended.returncode, ended.stderr.count("users own"), script.last.standby) == (6, 1, True)


def test_what_a_standby_has_said_is_read_although_its_end_is_seen_first(tmp_path: Path) -> None:
    loop, plan = Loop(), Plan((), {})
    kept = Standbys(plan=plan, folder=str(tmp_path), loop=loop)
    for _ in range(4):
        ours, its = socket.socketpair()
        send(its, {"refused": {"package": "left", "reason": "why"}})
        its.close()
        pid = os.posix_spawn("/bin/sh", ["sh", "-c", ":"], os.environ)
        standby = _Standby(pid=pid, local_rank="0", plan=plan, control=ours, ended=os.pidfd_open(pid))
        kept._alive.append(standby)
        loop.watch(standby.ended, lambda: None)
        loop.watch(ours.fileno(), lambda: None)
        kept._end(standby)
    record = json.loads((tmp_path / STANDBYS).read_text())
    assert (record["left_out"], record["failure"]) == ({"left": "why"}, "")


def standbys(node: Node) -> dict[str, int]:
    """Processes by local rank; empty where not all are there."""
    path = node.run_directory / "warm" / STANDBYS
    if not path.exists() or lacks_standbys(path.parent, processes=node.config["processes"]):
        return {}
    return json.loads(path.read_text())["ready"]


@pytest.mark.long("warm-starts")
@pytest.mark.usefixtures("ranks")
async def test_killed_ranks_start_again_from_standbys_or_are_forked_where_these_have_died(
    python: str, tmp_path: Path
) -> None:
    script = tmp_path / "threaded.py"
    script.write_text(
        "import runpy, sys\nimport starts_thread, reads_local_rank\nsys.path.append('')\nrunpy.run_path('train.py')\n"
    )
    node = Node([python, "-m", "torch.distributed.run", str(script)], processes=2)
    async with running(node):
        ready = await first_world([node], processes=2)
        ports = ready[0].body["store_ports"]
        waiting = await eventually(lambda: standbys(node), within=90)
        os.kill(node.ranks()[1], signal.SIGKILL)
        await node.agent.heard(READY)
        await form_world([node], 2, port=ports[1], processes=2)
        await all_step([node], 2, processes=2)
        assert node.ranks(2) == {int(rank): pid for rank, pid in waiting.items()}
        starts = ProgressReader(node.run_directory).starts(generation=2, processes=2)
        assert starts is not None
        assert (starts.warm, starts.standbys) == (2, 2)
        assert starts.standby_reason == "starts_thread: its import started 1 threads"

        waiting = await eventually(lambda: standbys(node), within=90)
        os.kill(waiting["1"], signal.SIGKILL)
        os.kill(node.ranks(2)[0], signal.SIGKILL)
        await node.agent.heard(READY)
        await form_world([node], 3, port=ports[2], processes=2)
        await all_step([node], 3, processes=2)
        starts = read_starts(node.run_directory / "warm", generation=3, processes=2)
        assert [(start.warm, start.standby) for start in starts] == [(True, True), (True, False)]
    assert node.processes() == []


WITH_A_DEVICE_FILE = """\
folder=$(mktemp -d) && mount -t tmpfs none "$folder" && mkdir "$folder/shm" && touch "$folder/nvidia0" &&
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty /dev/fd "$folder" &&
mount --bind /dev/shm "$folder/shm" && mount --move "$folder" /dev && rmdir "$folder" && exec "$@"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a /dev of one's own takes root")
@pytest.mark.long("warm-starts")
@pytest.mark.usefixtures("ranks")
async def test_beside_a_gpu_ranks_have_standbys_without_further_need() -> None:
    node = Node([*TORCHRUN, "train.py"])
    node.placed_by = ["unshare", "--mount", "sh", "-c", WITH_A_DEVICE_FILE, "sh"]
    async with running(node):
        ready = await first_world([node])
        waiting = await eventually(lambda: standbys(node), within=90)
        os.kill(node.ranks()[0], signal.SIGKILL)
        await node.agent.heard(READY)
        await form_world([node], 2, port=ready[0].body["store_ports"][1])
        await all_step([node], 2)
        [start] = read_starts(node.run_directory / "warm", generation=2, processes=1)
        assert (start.pid, start.standby, start.reason) == (
            waiting["0"],
            True,
            "the node has GPUs, whose driver no fork survives",
        )


def test_devices_are_seen_by_their_files(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    assert not has_devices({}, tmp_path)
    (tmp_path / "nvidia0").touch()
    assert has_devices({}, tmp_path)
    assert has_devices({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path)
    assert not has_devices({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
