"""A training container that attacks its agent with all that it can write and dial, in a real pod, until it is ended."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

from perdure.activities.nodes.kubernetes.site_policy import SitePolicy
from perdure.contract import JobPhase
from tests.kubernetes.pods import PodJob, TestCluster
from tests.kubernetes.site import perdure
from tests.support.waiting import eventually

ROUNDS = 12
"""Twice as many as there are traps: each of them takes the place of each file at least once."""

ATTACK = """
import json, os, pathlib, shutil, socket, sys, threading

run, out = pathlib.Path(os.environ["PERDURE_RUN_DIR"]), pathlib.Path(sys.argv[1])
private = "/perdure-agent/agent.json"

def endless(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)

traps = [
    lambda path: path.symlink_to(private),
    lambda path: path.symlink_to("/proc/self/environ"),
    lambda path: path.symlink_to("/dev/zero"),
    os.mkfifo,
    endless,
    lambda path: path.mkdir(),
]
expected = ["logs/output.log", "logs/output.log.1", "logs/output.times", "progress/0", "events/torchrun.jsonl"]
expected += ["errors/rank-exits.json", "exit.json", "checkpoint-desired.json", "agent-state.json"]
sockets = [str(path) for path in run.rglob("*") if path.is_socket()]
stored = pathlib.Path("/storage")

def flood(path, content):
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as link:
                link.settimeout(5)
                link.connect(path)
                link.sendall(content)
        except OSError:
            pass

bodies = [
    b"POST /hello HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 999999999999\\r\\n\\r\\n" + b"[" * (1 << 22),
    b"GET /" + b"a" * (1 << 22),
    b"\\0" * (1 << 20),
]
for path in sockets:
    for body in bodies:
        threading.Thread(target=flood, args=(path, body), daemon=True).start()

def readable():
    try:
        return bool(open(private).read(1))
    except OSError:
        return False

replaced = number = 0
while True:
    for root in (run, stored):
        names = [path for path in root.rglob("*") if not path.is_socket() and (path.is_symlink() or not path.is_dir())]
        for path in {*names, *(run / name for name in expected)}:
            try:
                path.parent.mkdir(exist_ok=True)
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
                traps[number % len(traps)](path)
                replaced += 1
            except OSError:
                pass
    number += 1
    said = {"rounds": number, "replaced": replaced, "sockets": len(sockets), "readable": readable()}
    (out / "new").write_text(json.dumps(said))
    (out / "new").replace(out / "said")
    threading.Event().wait(0.5)
"""


async def test_the_agent_serves_on_and_tells_nothing(cluster: TestCluster, job: PodJob, results: Path) -> None:
    results.chmod(0o777)
    mounts = [{"name": "results", "mountPath": str(results)}, {"name": "stored", "mountPath": "/storage"}]
    template: dict[str, Any] = {
        "spec": {
            "containers": [{"name": "training", "volumeMounts": mounts}],
            "initContainers": [
                {"name": "perdure-agent", "volumeMounts": [{"name": "stored", "mountPath": "/mnt/stored"}]}
            ],
            "volumes": [{"name": "results", "hostPath": {"path": str(results)}}, {"name": "stored", "emptyDir": {}}],
        }
    }
    spec: dict[str, Any] = {
        "name": "hostile",
        "namespace": job.namespace,
        "backend": "kubernetes",
        "outputs": {"logs": "file:///mnt/stored/logs"},
        "limits": {"termination_grace_period": "2s"},
        "roles": {
            "worker": {
                "nodes": 1,
                "image": cluster.agent_image,
                "rendezvous": "env",
                "nproc_per_node": 1,
                "command": ["python3", "-c", ATTACK, str(results)],
                "pod_template": template,
            }
        },
    }

    def said() -> dict[str, Any]:
        file = results / "said"
        return json.loads(file.read_text()) if file.exists() else {}

    async with perdure(cluster, job.namespace, policy=SitePolicy(host_paths=(str(results),))) as (_, client):
        await client.submit(spec)
        await eventually(lambda: said().get("rounds", 0) >= ROUNDS, what=lambda: str(said()))
        attack = said()
        assert attack["sockets"] >= 1, "else nothing was flooded"
        assert attack["replaced"] > ROUNDS
        assert attack["readable"] is False
        [pod] = await job.pods()
        prepared = next(one for one in pod["spec"]["initContainers"] if one["name"] == "perdure-prepare")
        config = next(one["value"] for one in prepared["env"] if one["name"] == "PERDURE_PREPARE_AGENT_CONFIG")
        token = json.loads(config)["node"]["token"]
        lines: list[str] = []
        async with asyncio.timeout(60), aclosing(client.logs("hostile")) as log:
            lines += [line.text async for line in log]
        assert token not in "".join(lines)
        [agent] = [one for one in pod["status"]["initContainerStatuses"] if one["name"] == "perdure-agent"]
        assert "running" in agent["state"]
        assert agent["restartCount"] == 0
        assert (await client.status("hostile")).phase is JobPhase.RUNNING
        await client.cancel("hostile")
        assert (await client.wait("hostile")).phase is JobPhase.CANCELLED
    assert await job.nothing_left()
