"""Tests that commands lose nothing on narrow terminals, on real ones of these widths: jobs are read from an archive."""

from __future__ import annotations

import io
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import pytest
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from perdure.cli.common import Session, out
from perdure.cli.main import app
from perdure.cli.rows import Rows
from perdure.cli.terminal import SafeConsole, link
from perdure.client.views import JobSummary
from perdure.contract import (
    ArchivedJob,
    ArchivedRole,
    Check,
    ClusterJob,
    ClusterView,
    HistoryAnswer,
    Holding,
    JobPhase,
    Machine,
    NodeChecks,
    Pace,
    PastJob,
    ScalingView,
)
from tests.page.played import PlayedJob, interrupted
from tests.support.command_line import CommandLine

URL = "http://127.0.0.1:8233/namespaces/default/workflows/job%2Fdefault%2Fllama-8b-sft"
_LINK = re.compile(r"\x1b\]8;[^;]*;([^\x1b]*)\x1b\\")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive with one job, which was interrupted."""
    job, folder = PlayedJob(interrupted()), tmp_path_factory.mktemp("archive")
    ended = {"finished_at": datetime.now(UTC), "phase": JobPhase.SUCCEEDED}
    record = ArchivedJob(
        namespace="default",
        name="llama",
        uid=job.status.uid,
        workflow_id="job/default/llama",
        written_at=datetime.now(UTC),
        is_final=True,
        started_at=job.status.started_at,
        finished_at=datetime.now(UTC),
        roles={"worker": ArchivedRole(status=job.status.model_copy(update=ended), nodes=job.nodes)},
        incidents=tuple(job.incidents),
    )
    place = folder / "default" / "llama" / job.status.uid
    for node in job.nodes:
        (place / "logs" / f"worker-{node.rank}" / "1").mkdir(parents=True)
        parts = {"part-000001.log": b"step 1\r\nloss \xe2\x82\xac\r\n", "complete": b""}
        for name, content in parts.items():
            (place / "logs" / f"worker-{node.rank}" / "1" / name).write_bytes(content)
    (place / "job.json").write_text(record.model_dump_json())
    return folder


@pytest.mark.parametrize("command", ["status", "nodes", "explain", "logs"])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_cut(archive: Path, tmp_path: Path, command: str) -> None:
    shell = CommandLine.local(tmp_path, tmp_path / "state")
    place = f"file://{archive}"
    piped = shell.run(command, "llama", "--archive", place)
    assert piped.code == 0, piped.err
    assert "\r" not in piped.out
    # Names of columns without content are left out.
    words = re.findall(r"\b[a-z]{4,}", piped.out)
    for columns in (80, 60, 40):
        terminal = shell.on_terminal(command, "llama", "--archive", place, columns=columns)
        assert terminal.leave() == 0, terminal.text
        lines = [line.rstrip("\r") for line in terminal.text.split("\n")]
        assert not [line for line in lines if cell_len(line) > columns]
        assert "…" not in terminal.text.replace(place, "")
        shown = re.sub(r"\s", "", terminal.text)
        assert [word for word in words if word not in shown] == []


NOW = datetime.now(UTC)
ANSWERS: dict[str, object] = {
    "list": [
        JobSummary(
            name="llama-8b-sft-with-a-long-name",
            namespace="research-nlp",
            workflow_id="job/research-nlp/llama",
            run_id="0",
            phase=JobPhase.RUNNING,
            owner="[someone]@research.example",
            world_size=2048,
            restarts=3,
            started_at=NOW - timedelta(hours=50),
        )
    ],
    "cluster": [
        ClusterView(
            backend="kubernetes",
            seen_at=NOW,
            machines=(
                Machine(
                    name="gpu-7.rack-12.site.example",
                    capacity={"cpu": 96, "memory": 2.0**41, "nvidia.com/gpu": 8},
                    taints=("dedicated=training:NoSchedule",),
                    problem="its kubelet has posted no status for 4 minutes",
                    held=(Holding(namespace="default", job="llama-8b-sft", role="worker", nodes=8),),
                ),
            ),
            machines_total=2,
            jobs=(
                ClusterJob(
                    namespace="default",
                    job="llama-8b-sft",
                    uid="0123abcd",
                    role="worker",
                    phase=JobPhase.STARTING,
                    nodes=7,
                    waiting=1,
                    waits_for="0/12 machines are available: insufficient nvidia.com/gpu",
                    fewest=4,
                    most=16,
                    started_at=NOW,
                ),
            ),
            jobs_total=1,
        )
    ],
    "plan": PlayedJob(interrupted()).status.model_copy(
        update={
            "scaling": ScalingView(
                fewest=2,
                largest=8,
                global_batch=True,
                min_efficiency=0.7,
                paces=(Pace(nodes=2, step=2.0, spread=0.1, generation=2), Pace(nodes=4, step=1.25, generation=1)),
                chosen=2,
                steps_left=900,
                price=2.1,
                why="more nodes would be used less than scaling.min_efficiency demands",
            )
        }
    ),
    "check": (
        NodeChecks(
            node=3,
            checks=(
                Check(name="processor", value=1702.0, bound=841.0, unit="MB/s", seconds=0.03),
                Check(name="disk", subject="temporary folder", problem="/tmp: No space left on the device"),
            ),
        ),
    ),
    "history": HistoryAnswer(
        found=1,
        jobs=(
            PastJob(
                name="llama-8b-sft-with-a-long-name",
                namespace="default",
                uid="0123abcd",
                owner="[someone]@research.example",
                phase=JobPhase.FAILED,
                reason="the restart budget of 10 in 1 hour is spent",
                started_at=NOW - timedelta(days=1),
                finished_at=NOW,
                nodes=16,
                worlds=12,
                restarts=11,
                step=120_000,
                lost_seconds=4321.0,
                node_hours=384.0,
            ),
        ),
    ),
}


@pytest.mark.parametrize("command", list(ANSWERS))
def test_tables_of_many_jobs_lose_nothing_either(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(session: Session, work: object) -> object:
        return ANSWERS[command]

    monkeypatch.setattr(Session, "run", answer)
    words = [command, "llama"] if command in ("plan", "check") else [command, "-n", "default"]

    def shown(width: int) -> str:
        monkeypatch.setattr(out, "width", width)
        monkeypatch.setattr(out, "soft_wrap", width > 1000)
        result = CliRunner().invoke(app, words)
        assert result.exit_code == (3 if command == "check" else 0), result.exception
        return result.output

    # Names of columns without content are left out.
    wide = re.findall(r"\b[a-z0-9]{4,}", shown(5000))
    assert {"llama", "processor"} & set(wide)
    for columns in (80, 60, 40):
        narrow = shown(columns)
        assert "…" not in narrow
        assert not [line for line in narrow.splitlines() if cell_len(line) > columns]
        kept = re.sub(r"\s", "", narrow)
        assert [word for word in wide if word not in kept] == []


def test_a_terminal_without_colors_gets_none(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = CommandLine.local(tmp_path, tmp_path / "state")
    colored = shell.on_terminal("status", "llama", "--archive", f"file://{archive}")
    colored.leave()
    assert "\x1b[1;32m" in colored.raw
    monkeypatch.setenv("NO_COLOR", "1")
    plain = shell.on_terminal("status", "llama", "--archive", f"file://{archive}")
    plain.leave()
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", plain.raw)
    assert "\x1b" not in shell.run("status", "llama", "--archive", f"file://{archive}").out
    assert os.environ["NO_COLOR"] == "1"


def drawn(table: Rows, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_table_gives_up_empty_columns_then_breaks_its_last_one_and_then_tells_each_row() -> None:
    table = Rows.of("NODE", "STATE", "LOSS", "REASON")
    table.add_row("0", "[green]ready[/]", "", "")
    table.add_row("12", "lost", "", "its machine has been drained by an operator")
    wide = drawn(table, 100)
    assert wide[0].split() == ["NODE", "STATE", "LOSS", "REASON"]
    slim = drawn(table, 60)
    assert slim[0].split() == ["NODE", "STATE", "REASON"]
    assert len(slim) == 3
    broken = drawn(table, 45)
    assert broken[0].split() == ["NODE", "STATE", "REASON"]
    assert len(broken) == 4
    assert drawn(table, 30) == [
        "NODE 0  STATE ready",
        "NODE 12  STATE lost",
        "  REASON its machine has been",
        "drained by an operator",
    ]


def test_a_link_is_whole_where_there_is_room_and_leads_to_its_page_where_there_is_none() -> None:
    def shown(
        room: int, *, force_terminal: bool = True, color_system: Literal["256"] | None = "256"
    ) -> tuple[str, list[str]]:
        terminal = SafeConsole(file=io.StringIO(), width=200, force_terminal=force_terminal, color_system=color_system)
        terminal.print(link(URL, terminal, room))
        assert isinstance(terminal.file, io.StringIO)
        raw = terminal.file.getvalue()
        return _LINK.sub("", raw).strip(), [found for found in _LINK.findall(raw) if found]

    assert shown(100) == (URL, [URL])
    assert shown(40) == ("127.0.0.1:8233/…job/default/llama-8b-sft", [URL])
    assert shown(20) == ("…efault/llama-8b-sft", [URL])
    assert shown(40, force_terminal=False) == (URL, [])
    assert shown(40, color_system=None) == (URL, [])
