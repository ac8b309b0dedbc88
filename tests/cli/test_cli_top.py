"""Tests of `perdure top`, and of live views on terminals of all widths."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from perdure.cli.live import View as JobView
from perdure.cli.terminal import SafeConsole
from perdure.cli.top import View
from perdure.client.sync import SyncClient
from perdure.client.views import JobSnapshot, overall_progress
from perdure.page.looks import JobList, ListLook
from tests.page.played import HOSTILE, PlayedClient, PlayedJob, failed, interrupted
from tests.support.command_line import CommandLine

WAITS = "until test -e go; do sleep 0.2; done"


async def look(*names: str) -> ListLook:
    ended = PlayedJob(failed(), name="gpt")
    ended.fields = {"finished_at": datetime.now(UTC), "phase": "FAILED"}
    played = PlayedClient(ended, *(PlayedJob(interrupted(), name=name) for name in names))
    return await JobList(played, everywhere=True, at_once=10).look()


def drawn(view: object, width: int, *, height: int = 40) -> list[str]:
    console = SafeConsole(file=io.StringIO(), width=width, height=height, highlight=False)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [40, 80, 120, 200])
async def test_a_table_of_jobs_fits_into_its_terminal(width: int) -> None:
    lines = drawn(View(await look("llama", "x" * 300), everywhere=False), width)
    assert all(len(line) <= width for line in lines)
    assert lines[0] == "3 jobs, 2 open"
    words = "\n".join(lines)
    assert "llama" in words
    assert "RUNNING" in words
    assert ("SPEED" in words) == (width >= 60)
    assert ("LAST INCIDENT" in words) == (width >= 100)
    assert "/1,000 10%" in words, "a step is never cut"


async def test_a_pipe_gets_rows_that_are_as_long_as_their_words() -> None:
    name = "x" * 300
    lines = drawn(View(await look("llama", name), everywhere=True), 100_000)
    assert any(name in line for line in lines), "nothing is cut"
    assert max(map(len, lines)) < 600


async def test_jobs_that_run_come_first_and_the_rest_is_counted() -> None:
    lines = drawn(View(await look(*(f"job-{number}" for number in range(20))), everywhere=True), 120, height=10)
    assert lines[2].startswith("job-")
    assert lines[-1] == "and 15 more: perdure list"
    assert len(lines) <= 10
    (last,) = [line for line in drawn(View(await look("llama"), everywhere=True), 120) if "FAILED" in line]
    assert "#1" in last, "why it has failed"


async def test_hostile_names_stay_text() -> None:
    words = "\n".join(drawn(View(await look(HOSTILE), everywhere=True), 200))
    assert "\x1b" not in words
    assert "<img src=x" in words


async def test_without_colors_there_are_none() -> None:
    found = await look("llama")
    for environment, colored in (({}, True), ({"NO_COLOR": "1"}, False)):
        console = Console(
            file=io.StringIO(), force_terminal=True, color_system="standard", _environ=environment, width=120
        )
        console.print(View(found, everywhere=True))
        assert isinstance(console.file, io.StringIO)
        assert ("\x1b[32m" in console.file.getvalue()) == colored


def live_view(*, nodes: int) -> JobView:
    played = PlayedJob(interrupted())
    known = played.nodes
    many = tuple(known[0].replace(rank=number, group_rank=number) for number in range(nodes)) if nodes > 4 else known
    status = played.status
    snapshot = JobSnapshot(time=datetime.now(UTC), status=status, nodes=many, progress=overall_progress(many, status))
    view = JobView(name="llama", flag="", page="", keys=True, panel="logs")
    for second in range(20):
        view.take(snapshot.model_copy(update={"time": snapshot.time + timedelta(seconds=second)}))
    view.log_lines.extend(["  0 | step 1 " + "y" * 500, "  1 | " + HOSTILE])
    return view


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_live_view_fits_into_its_terminal_with_its_figures_whole(width: int) -> None:
    lines = drawn(live_view(nodes=4), width)
    assert all(len(line) <= width for line in lines)
    words = " ".join(" ".join(lines).split())
    for figure in ("/1,000 10%", "2.0 steps/s", "ETA", "[q]uit"):
        assert figure in words
    assert any(set(line.strip()) <= set("━╸╺ ") and line.strip() for line in lines), "a bar of its own"
    assert sum("| step 1" in line for line in lines) == 1, "a long line of the script is one line"


def test_of_many_nodes_a_live_view_tells_how_many_are_in_each_state() -> None:
    lines = drawn(live_view(nodes=2000), 100)
    (line,) = [line for line in lines if line.startswith("NODES")]
    assert line.startswith("NODES 2,000 ■ stepping")


@pytest.mark.long("commands")
def test_top_shows_jobs_live_on_a_terminal_and_once_to_a_pipe(
    command_line: CommandLine, jobs: SyncClient, job_name: str
) -> None:
    command = ["sh", "-c", f"cd {command_line.folder} && {WAITS}"]
    jobs.submit({"name": job_name, "backend": "local", "roles": {"worker": {"nodes": 1, "command": command}}})
    terminal = command_line.on_terminal("top", columns=120)
    terminal.expect(job_name)
    terminal.expect("RUNNING")
    terminal.press("q")
    assert terminal.leave() == 0
    once = command_line.run("top")
    assert job_name in once.out
    assert "\x1b" not in once.out
    listed = json.loads(command_line.run("top", "-o", "json").out)
    assert job_name in [one["name"] for one in listed]
    command_line.write("go", "")
    assert jobs.wait(job_name).exit_code == 0


@pytest.mark.long("commands")
def test_run_shows_the_script_s_last_lines_and_has_keys(
    command_line: CommandLine, jobs: SyncClient, job_name: str
) -> None:
    script = f"echo first words; {WAITS}; echo last words"
    terminal = command_line.on_terminal("run", "--name", job_name, "--nodes", "1", "--", "sh", "-c", script)
    terminal.expect("| first words")
    terminal.press("q")
    terminal.expect("Detached")
    assert terminal.leave() == 130
    command_line.write("go", "")
    assert jobs.wait(job_name).exit_code == 0
