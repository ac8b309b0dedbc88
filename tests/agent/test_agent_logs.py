"""Tests of copying the log: parts, rotations, restarts, and storage that rejects writes."""

from __future__ import annotations

import re
import secrets
import struct
from datetime import UTC, datetime
from pathlib import Path

import fsspec
import pytest

from perdure.agent.logs import FIRST_PARTS, LAST_PARTS, LogShipper
from perdure.base.errors import LogsUnavailable
from perdure.client.logs.copies import CopiedLog
from perdure.contract import NodeCredentials
from perdure_launcher.log_times import TimesWriter

NODE = NodeCredentials(uid="0a1b2c3d", role="worker", rank=1, incarnation=2, token="secret")


class Log:
    """A node's log, rotated as the launcher does it."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "logs" / "output.log"
        self.path.parent.mkdir(parents=True)
        self.all = b""

    def write(self, content: bytes) -> None:
        self.all += content
        with self.path.open("ab") as file:
            file.write(content)

    def replace(self, content: bytes) -> None:
        """Replaces the newest file by one with the same inode number, as file systems that use them again do."""
        self.path.write_bytes(content)

    def rotate(self) -> None:
        for number in range(4, 0, -1):
            source = self.path if number == 1 else self.path.with_name(f"output.log.{number - 1}")
            if source.exists():
                source.rename(self.path.with_name(f"output.log.{number}"))
        self.path.touch()


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/storage/job" if request.param == "file" else f"memory://{secrets.token_hex(4)}/job"


def shipped(url: str) -> bytes:
    files, root = fsspec.core.url_to_fs(f"{url}/worker-1/2")
    return b"".join(files.cat_file(path) for path in sorted(files.ls(root, detail=False)) if path.endswith(".log"))


class TimedLog(Log):
    """A log with the index that the launcher writes beside it; a line a second."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.now = 0.0
        self._writer = self._begin()

    def _begin(self) -> TimesWriter:
        return TimesWriter(self.path.with_name("output.times"), clock=lambda: self.now)

    def line(self, number: int) -> None:
        self.now = 1_800_000_000.0 + number
        self._writer.note(self.path.stat().st_size if self.path.exists() else 0)
        self.write(f"line {number}\n".encode())

    def rotate(self) -> None:
        self._writer.close()
        super().rotate()
        times = self.path.with_name("output.times")
        times.rename(times.with_name("output.times.1"))
        self._writer = self._begin()


def timed(number: int) -> tuple[str, datetime]:
    return f"line {number}", datetime.fromtimestamp(1_800_000_000 + number, UTC)


async def test_what_is_written_arrives_in_order(tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    log = Log(run)
    shipper = LogShipper(run, url, NODE, part_max=1000)
    await shipper.ship()
    for round_number in range(6):
        log.write(b"%d " % round_number * 350)
        if round_number in (2, 4):
            log.rotate()
        await shipper.ship()
        assert shipped(url) == log.all
    # Another agent continues where this one was.
    log.write(b"and on")
    log.rotate()
    log.write(b" and on")
    await LogShipper(run, url, NODE, part_max=1000).ship()
    assert shipped(url) == log.all


async def test_several_rotations_between_two_copies_lose_nothing_that_is_kept(tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    log = Log(run)
    shipper = LogShipper(run, url, NODE, part_max=64)
    log.write(b"first\n")
    await shipper.ship()
    for number in range(3):
        log.write(b"file %d\n" % number * 20)
        log.rotate()
    await shipper.ship()
    assert shipped(url) == log.all


async def test_a_newer_file_with_the_inode_number_of_a_deleted_one_is_copied_from_its_beginning(
    tmp_path: Path, url: str
):
    run = tmp_path / "run"
    log = Log(run)
    log.write(b"of the deleted file\n" * 5)
    await LogShipper(run, url, NODE, part_max=1000).ship()
    log.replace(b"of the newer file\n" * 9)
    await LogShipper(run, url, NODE, part_max=1000).ship()
    assert shipped(url) == log.all + b"of the newer file\n" * 9


async def test_storage_that_refuses_is_tried_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    log = Log(run)
    blocked = tmp_path / "storage"
    blocked.write_text("a file where a folder should be")
    shipper = LogShipper(run, f"file://{blocked}/job", NODE)
    log.write(b"hello")
    await shipper.ship()
    blocked.unlink()
    await shipper.ship()
    assert shipped(f"file://{blocked}/job") == b"hello"


async def test_an_archive_keeps_the_beginning_and_the_end_of_a_long_log_and_says_what_is_left_out(tmp_path: Path):
    run, url = tmp_path / "run", f"file://{tmp_path}/kept"
    log = Log(run)
    shipper = LogShipper(run, url, NODE, part_max=10, keep_all=False)
    count = FIRST_PARTS + LAST_PARTS + 10
    for number in range(count):
        log.write(f"line {number:04}\n".encode())
        if number % 7 == 0:
            await shipper.ship()
    await shipper.ship()
    copied = CopiedLog(f"{url}/worker-1/2", rank=1, incarnation=2, in_archive=True)
    lines = [line.text async for line in copied.old_lines(None, None)]
    numbers = [int(line.removeprefix("line ")) for line in lines if line.startswith("line ")]
    last = count - LAST_PARTS + 1  # The last part is begun and empty.
    assert numbers == [*range(FIRST_PARTS), *range(last, count)]
    assert [line for line in lines if "left out" in line] == lines[FIRST_PARTS + 1 : FIRST_PARTS + 2]
    assert "may have continued" in lines[-1], "the agent is still at work, or lost"
    await shipper.finish()
    lines = [line.text async for line in copied.old_lines(None, None)]
    assert lines[-1] == f"line {count - 1:04}"
    assert [line.text async for line in copied.old_lines(2, None)] == lines[-2:]


async def test_the_end_is_not_said_to_be_kept_where_it_could_not_be_copied(tmp_path: Path):
    run, blocked = tmp_path / "run", tmp_path / "storage"
    log = Log(run)
    blocked.write_text("a file where a folder should be")
    shipper = LogShipper(run, f"file://{blocked}/job", NODE)
    log.write(b"hello\n")
    await shipper.finish()
    blocked.unlink()
    await shipper.ship()
    assert not list(blocked.rglob("complete"))
    await shipper.finish()
    assert list(blocked.rglob("complete"))


async def test_copies_keep_the_times_of_lines_across_parts_and_rotations(tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    log = TimedLog(run)
    shipper = LogShipper(run, url, NODE, part_max=50)
    for number in range(30):
        log.line(number)
        if number == 12:
            await shipper.ship()
            log.rotate()
    await shipper.ship()
    copied = CopiedLog(f"{url}/worker-1/2", rank=1, incarnation=2)
    assert [tuple(line) async for line in copied.old_lines(None, None)] == [timed(number) for number in range(30)]
    since = timed(24)[1]
    assert [tuple(line) async for line in copied.old_lines(None, since)] == [timed(number) for number in range(24, 30)]
    assert [tuple(line) async for line in copied.old_lines(2, since)] == [timed(28), timed(29)]
    assert [tuple(line) async for line in copied.old_lines(20, since)] == [timed(number) for number in range(24, 30)]


async def test_parts_that_were_printed_before_the_requested_time_are_not_read(tmp_path: Path) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/kept"
    log = TimedLog(run)
    for number in range(30):
        log.line(number)
    await LogShipper(run, url, NODE, part_max=50).ship()
    parts = sorted((tmp_path / "kept").rglob("part-*.log"))
    for part in parts[:-3]:
        part.unlink()
        part.mkdir()  # It cannot be read.
    copied = CopiedLog(f"{url}/worker-1/2", rank=1, incarnation=2)
    since = timed(25)[1]
    assert [tuple(line) async for line in copied.old_lines(None, since)] == [timed(number) for number in range(25, 30)]
    with pytest.raises(LogsUnavailable):
        assert [line async for line in copied.old_lines(None, timed(1)[1])]


async def test_times_of_an_archive_fit_its_lines_where_the_middle_is_left_out(tmp_path: Path) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/kept"
    log = TimedLog(run)
    shipper = LogShipper(run, url, NODE, part_max=7, keep_all=False)
    for number in range(100, 100 + FIRST_PARTS + LAST_PARTS + 30):
        log.line(number)
    # Another agent than the one that wrote the first parts leaves out the middle.
    await shipper.ship()
    for number in range(200, 210):
        log.line(number)
    await LogShipper(run, url, NODE, part_max=7, keep_all=False).ship()
    copied = CopiedLog(f"{url}/worker-1/2", rank=1, incarnation=2, in_archive=True)
    lines = [line async for line in copied.old_lines(None, None)]
    # Parts of 7 bytes leave parts of two lines at the gap.
    whole = [line for line in lines if re.fullmatch(r"line \d{3}", line.text)]
    assert len(whole) > LAST_PARTS // 2
    assert all(line == timed(int(line.text.removeprefix("line "))) for line in whole)
    names = {path.name for path in (tmp_path / "kept").rglob("*.*")}
    logs = {name.removesuffix(".log") for name in names if name.endswith(".log")}
    assert {name.removesuffix(".times") for name in names if name.endswith(".times")} <= logs


@pytest.mark.parametrize("content", [b"{", b"[1]", b'[["a", 2]]', b"[[0, 1e300]]", b"[[0, null]]", b"\xff"])
async def test_times_that_cannot_be_read_hide_no_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "part-000001.log").write_bytes(b"hello\n")
    (tmp_path / "part-000001.times").write_bytes(content)
    copied = CopiedLog(f"file://{tmp_path}", rank=1, incarnation=2)
    assert [tuple(line) async for line in copied.old_lines(None, datetime.now(UTC))] == [("hello", None)]


async def test_an_index_of_the_training_s_own_making_gives_no_times(tmp_path: Path) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/kept"
    log = Log(run)
    log.write(b"hello\nworld\n")
    records = [(0, float("nan")), (6, 1e300), (6, -5.0)]
    (run / "logs" / "output.times").write_bytes(b"".join(struct.pack("<Qd", *record) for record in records))
    await LogShipper(run, url, NODE).ship()
    copied = CopiedLog(f"{url}/worker-1/2", rank=1, incarnation=2)
    assert [tuple(line) async for line in copied.old_lines(None, None)] == [("hello", None), ("world", None)]
