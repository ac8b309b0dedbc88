"""Takes pictures of the page of `perdure ui`: a list of real jobs, and one whose rank and node were killed."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.recovery.perdure_job import node_processes
from perdure.base.state_folder import StateFolder
from perdure.client.client import Client
from perdure.client.views import overall_progress
from perdure.contract import JobPhase
from perdure.contract.names import uid_of
from perdure.local.control_plane import LocalControlPlane
from perdure.page.server import serve_pages
from scripts.browser import ensure_browser
from tests.support.command_line import end_nodes
from tests.support.devtools import Tab, open_tab
from tests.support.waiting import eventually

NAME = "llama-8b-sft"
NODES = 3
STEPS = 1_500
KILLS = (250, 500)
"""Steps at which a rank and a node are killed."""
SHOWN_AT = 750

SCRIPT = f"""
import os, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from perdure_training import report
from perdure_training.checkpoint import Checkpointer
from perdure_training.shards import ShardBatches, ShardingClient

torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
data = ShardingClient("corpus", size=200_000, shard_size=256, shuffle=True)
checkpointer = Checkpointer(every=1, replicated=True)
state = {{"model": model, "optimizer": optimizer, "data": data, "step": 0}}
checkpointer.restore(state)
truth = torch.randn(64, generator=torch.Generator().manual_seed(1)) / 8
batches = ShardBatches(data, batch_size=16)
for batch in batches.over(batches):
    inputs = torch.randn(len(batch), 64)
    loss = (model(inputs).squeeze(1) - inputs @ truth - 0.5).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    data.step()
    state["step"] += 1
    report(step=state["step"], loss=loss.item(), total={STEPS})
    checkpointer.save(state["step"], state)
    if dist.get_rank() == 0 and state["step"] % 50 == 0:
        print(f"step {{state['step']}} loss {{loss.item():.4f}}", flush=True)
    time.sleep(0.08)
    if state["step"] >= {STEPS}:
        break
"""

SHORT = """
import sys, time
from perdure_training import report
steps, fails = int(sys.argv[1]), sys.argv[2] == "fail"
for step in range(1, steps + 1):
    report(step=step, total=steps, loss=3 / step)
    time.sleep(0.1)
if fails:
    raise ValueError("batch 40 has no labels")
"""


def jobs(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The jobs of the list; the last one has the page."""
    (folder / "short.py").write_text(SHORT, encoding="utf-8")
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")

    def short(name: str, steps: int, end: str = "end") -> Mapping[str, Any]:
        command = [sys.executable, str(folder / "short.py"), str(steps), end]
        role = {"nodes": 1, "command": command}
        return {"name": name, "backend": "local", "retry": {"max_restarts": 0}, "roles": {"worker": role}}

    yield short("tokenizer", 20)
    yield short("eval-nightly", 40, "fail")
    yield short("bert-distill", 10_000)
    yield short("reward-model", 10_000)
    yield {
        "name": NAME,
        "backend": "local",
        "labels": {"project": "sft"},
        "checkpoint": {"storage": f"file://{folder / 'checkpoints'}", "every": "15s"},
        "notifications": {
            "oncall": {"when": ["incident", "completion"], "command": ["true"]},
            "pager": {"when": ["incident"], "webhook": {"url": "http://127.0.0.1:9/page"}},
        },
        "roles": {
            "worker": {
                "nodes": NODES,
                "nproc_per_node": 1,
                "command": ["torchrun", str(folder / "train.py")],
                "env": {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            }
        },
    }


async def take_pictures(images: Path) -> None:
    """Runs the jobs, and writes what a browser shows of them, light and dark."""
    with tempfile.TemporaryDirectory(prefix="pp-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        plane = LocalControlPlane(StateFolder(folder / "state"))
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        try:
            async with Client(endpoint=await plane.ensure()) as client:
                await _run(client, folder)
                async with serve_pages(client, port=0) as link, open_tab(ensure_browser(print)) as tab:
                    await _picture(tab, link, images / "page-list", height=420)
                    await _picture(
                        tab, f"{link.partition('?')[0]}jobs/default/{NAME}/", images / "page-job", height=1500
                    )
                for job in await client.list(running=True):
                    await client.cancel(job.name)
                    await client.wait(job.name)
        finally:
            plane.kill_worker()
            plane.kill_server()
            end_nodes(plane.state.path)


async def _run(client: Client, folder: Path) -> None:
    for job in jobs(folder):
        await client.submit(job)
    uid = uid_of((await client.describe(NAME)).run_id)
    for number, step in enumerate(KILLS):
        await _reaches(client, step)
        _kill(uid, node=number == 1)
    await client.suspend("reward-model", reason="makes room")
    await _reaches(client, SHOWN_AT)

    async def suspended() -> bool:
        return (await client.status("reward-model")).phase is JobPhase.SUSPENDED

    await eventually(suspended)


async def _reaches(client: Client, step: int) -> None:
    async def reached() -> bool:
        status, nodes = await client.look(NAME)
        progress = overall_progress(nodes, status)
        return progress is not None and progress.step >= step

    await eventually(reached, within=300)


def _kill(uid: str, *, node: bool) -> None:
    """Kills a rank, or all processes of a node."""
    if node:
        for process in node_processes(f"{uid}/worker-{NODES - 1}/"):
            process.send_signal(signal.SIGKILL)
        return
    ranks = [one for one in node_processes(f"{uid}/") if any(word.endswith("train.py") for word in one.cmdline())]
    max(ranks, key=lambda one: one.create_time()).kill()


async def _picture(tab: Tab, address: str, path: Path, *, height: int) -> None:
    await tab.open(address)
    await eventually(lambda: tab.ask("document.querySelectorAll('#jobs tr, #facts dd').length > 3"))
    await tab.ask("document.querySelector('details')?.setAttribute('open', '')")
    for dark in (False, True):
        await tab.picture(path.with_name(f"{path.name}{'-dark' if dark else ''}.png"), dark=dark, height=height)
