"""Tests that run the commands of docs/operations.md in the page's order, on real jobs.

`test_temporal_recipes.py` runs those of the section about Temporal's command line, and the tests that
`tests/docs/test_operations_commands.py` names the rest of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from perdure.contract import JobPhase
from tests.docs.pages import PAGES
from tests.support.waiting import eventually
from tests.system.site import PATIENCE, WALK, Job, Site

RECIPES = "Recipes for Temporal's command line"
PROGRAMS = re.compile(r"(perdure|temporal|kubectl|helm|psql|curl|docker|python|make) ")


@dataclass(frozen=True)
class Run:
    """How a command of the page is run here."""

    more: str = ""
    """What a reader adds to it."""
    says: tuple[str, ...] = ()
    """Regular expressions, each of which its output has."""
    code: int = 0
    until: str = ""
    """It runs until it has printed this, and is then terminated."""


@dataclass(frozen=True)
class RunElsewhere:
    """The test that runs it."""

    test: str


RUNS: dict[str, Run | RunElsewhere] = {
    "perdure run": Run("--name FRESH --nodes 1 -- true", (r"Submitted FRESH", r"^FRESH  SUCCEEDED")),
    "perdure worker": Run(until="serving|polls|task queue"),
    "perdure join": Run("JOINED --nodes 1 -- sh -c 'echo joined'", (r"started the job JOINED", r"JOINED SUCCEEDED")),
    "perdure cluster": Run(
        says=(
            r"^local +1 machine, .*seen [\d.]+ m?s ago",
            r"^MACHINE +HAS +FREE +HELD BY",
            r" MINE 2",
            r"^JOB +PHASE +NODES +WAITS FOR +ONE MORE +ROOM",
            r"^MINE +RUNNING +2 of 1:2",
        )
    ),
    "perdure doctor": Run(says=(r"server", r"search attributes", r"worker", r"state folder")),
    "perdure status NAME": Run(
        says=(r"^MINE .*RUNNING", r"^CONTROL .*temporal ok", r"http://127\.0\.0\.1:\d+/namespaces")
    ),
    "perdure explain NAME": Run(says=(r"^#\d+ ", r"^SAW ", r"^DID ", r"node 1: rank \d SIGKILL")),
    "perdure logs NAME --node RANK": Run("--since 10m --grep began -t", (r"\d\d:\d\d:\d\d.* training began$",)),
    "perdure stacks NAME": Run(says=(r"^node 0 ", r"^node 1 ")),
    "perdure check NAME": Run(says=(r"^NODE +CHECK +OF", r"^0 +processor", r"^1 +reach .* ok *$")),
    "perdure shell NAME": Run("--node 0 -- sh -c 'echo in $PWD'", (r"^in /",)),
    "perdure cancel": Run("KEPT --wait", (r"KEPT",)),
    "perdure status": Run("MINE -o json", (r'"phase": "RUNNING"',)),
    "perdure list": Run(says=(r"^NAME +", r"^MINE +RUNNING")),
    "perdure temporal workflow terminate --query \"WorkflowId STARTS_WITH 'job/NAMESPACE/NAME'\" --yes": Run(
        says=(r"[Bb]atch",)
    ),
    "perdure scale": Run("MINE 1", (r"1",)),
    "perdure shell": Run("MINE --node 0 --print", (r"MINE-worker-0-",)),
    "perdure explain": Run("MINE -o json", (r'"culprit": 1',)),
    "perdure temporal": Run(
        "workflow list --query \"WorkflowId = 'job/default/MINE'\"", (r"Running +job/default/MINE",)
    ),
    "perdure suspend": Run("MINE --reason maintenance", (r"MINE",)),
    "perdure validate": Run("job.json", (r"job\.json",)),
    "perdure codec-server -- bash": Run("-c 'echo $TEMPORAL_CODEC_ENDPOINT'", (r"^http://127\.0\.0\.1:\d+",)),
    "perdure join --node-address": Run(
        "127.0.0.1 ADDRESSED --nodes 1 -- sh -c 'echo joined'", (r"ADDRESSED: node 0 at 127\.0\.0\.1;",)
    ),
}
"""The commands of the page."""


def commands() -> list[str]:
    """Each command of the page once, but those of the recipes, in its order."""
    [page] = [page for page in PAGES if page.name == "docs/operations.md"]
    text = page.path.read_text(encoding="utf-8")
    first = text[: text.index(f"\n### {RECIPES}\n")].count("\n")
    last = first + text.split(f"\n### {RECIPES}\n")[1].split("\n## ")[0].count("\n") + 1
    blocks = [
        (block.line + number, line.removeprefix("$ "))
        for block in page.blocks
        for number, line in enumerate(block.text.splitlines(), 1)
        if line.startswith("$ ")
    ]
    typed = {text for _, text in blocks}
    written = [*blocks, *((snippet.line, snippet.text) for snippet in page.snippets)]
    written.sort(key=lambda found: found[0])
    outside = [text for line, text in written if not first < line <= last]
    recipes = [text for line, text in written if first < line <= last and text not in typed]
    return list(dict.fromkeys(text for text in [*outside, *recipes] if PROGRAMS.match(text)))


class Reader:
    """Types commands into a shell on the machine of the local default."""

    def __init__(self, site: Site, names: Mapping[str, str]) -> None:
        self._names = names
        self.folder = site.folder
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        self._environment = {
            **os.environ,
            "PATH": path,
            "COLUMNS": "300",
            "PERDURE_STATE": str(site.state.path),
            "TEMPORAL_ADDRESS": "",
        }

    def named(self, text: str) -> str:
        for placeholder, name in self._names.items():
            text = re.sub(rf"\b{placeholder}\b", name, text)
        return text

    async def type(self, command: str, run: Run) -> str:
        """Runs one, and returns what differs from what is expected; empty if nothing does."""
        process = await asyncio.create_subprocess_exec(
            *("bash", "-euo", "pipefail", "-c", f"exec {self.named(f'{command} {run.more}'.strip())}"),
            cwd=self.folder,
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert process.stdout is not None
        printed = b""
        async with asyncio.timeout(PATIENCE):
            while line := await process.stdout.readline():
                printed += line
                if run.until and re.search(run.until, printed.decode()):
                    process.terminate()
            code = await process.wait()
        text = printed.decode()
        missing = [one for one in (run.until, *run.says) if not re.search(self.named(one), text, re.MULTILINE)]
        return f"{command} ended with {code}, without {missing}:\n{text}" if missing or code != run.code else ""


@pytest.fixture
def watched_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers watch their machine, as those of users do."""
    monkeypatch.delenv("PERDURE_CLUSTER", raising=False)


async def interrupted(site: Site) -> Job:
    out = site.folder / "walked"
    out.mkdir()
    walk = f"echo training began; exec {shlex.join([sys.executable, str(WALK), str(out)])}"
    job = await site.submit(command=["sh", "-c", walk], out=out, nodes="1:2")
    await job.running(nodes=2)
    job.signal(1, "rank")
    await job.running(nodes=2, after=1)
    return job


async def held(site: Site) -> Job:
    job = await site.submit(
        command=["sh", "-c", "exit 7"], nodes="1", retry={"fatal_exit_codes": [7]}, hold_on_failure="1h"
    )
    await job.until(lambda status: status.phase is JobPhase.HELD)
    return job


def test_every_command_of_the_page_is_run_here():
    assert [command for command in commands() if command not in RUNS] == []
    assert [command for command in RUNS if command not in commands()] == []


@pytest.mark.long("commands")
async def test_the_commands_of_the_page_do_what_it_says(watched_machines: None, own_site: Site):
    job, kept = await interrupted(own_site), await held(own_site)
    gone = await own_site.submit(script=WALK, nodes="1")
    await gone.running(nodes=1)
    reader = Reader(
        own_site,
        {
            "NAMESPACE/NAME": f"default/{gone.name}",
            "NAME": job.name,
            "MINE": job.name,
            "KEPT": kept.name,
            "FRESH": f"{job.name}-fresh",
            "JOINED": f"{job.name}-joined",
            "ADDRESSED": f"{job.name}-addressed",
            "RANK": "0",
        },
    )
    spec = {"name": "llama", "roles": {"worker": {"nodes": 1, "command": ["true"]}}}
    (own_site.folder / "job.json").write_text(json.dumps(spec))
    problems: list[str] = []
    for command in commands():
        run = RUNS[command]
        if isinstance(run, Run) and (problem := await reader.type(command, run)):
            problems.append(problem)
    assert not problems, "\n".join(problems)
    await job.until(lambda status: status.phase is JobPhase.SUSPENDED)
    assert (await kept.status()).phase is JobPhase.FAILED
    await eventually(lambda: not gone.processes(), within=PATIENCE, what="a terminated job leaves nothing")
