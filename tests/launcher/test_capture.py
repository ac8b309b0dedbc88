"""Tests of output capture: rotated, bounded, and never blocking the command."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from perdure_launcher.supervisor import capture as capture_module
from perdure_launcher.supervisor.capture import TAIL_CHARACTERS, Capture, PartlyWritten, RotatingFile, Sink

PATIENCE = timedelta(seconds=30)


@pytest.fixture(autouse=True)
def closed_logs() -> Iterator[None]:
    """Closes the files of a test's logs, which in a launcher are open until it ends."""
    opened: list[RotatingFile] = []
    create = RotatingFile.__init__

    def created(self: RotatingFile, *arguments: Any, **options: Any) -> None:
        create(self, *arguments, **options)
        opened.append(self)

    with mock.patch.object(RotatingFile, "__init__", created):
        yield
    for log in opened:
        log._times.close()
        if log._file >= 0:
            os.close(log._file)
            log._file = -1


def test_a_full_log_is_rotated_and_four_old_ones_are_kept(tmp_path: Path) -> None:
    log = RotatingFile(tmp_path / "output.log", max_bytes=100)
    for number in range(100):
        log.write(f"line {number:04}\n".encode())
    kept = ["output.log", *(f"output.log.{number}" for number in range(1, 5))]
    assert sorted(path.name for path in tmp_path.glob("output.log*")) == kept
    lines = "".join((tmp_path / name).read_text() for name in reversed(kept)).splitlines()
    assert lines == [f"line {number:04}" for number in range(100 - len(lines), 100)]
    assert all((tmp_path / name).stat().st_size <= 100 for name in kept)


def test_lines_are_not_torn_over_two_files_unless_one_fills_a_file(tmp_path: Path) -> None:
    log = RotatingFile(tmp_path / "output.log", max_bytes=50)
    log.write(b"a" * 30 + b"\n" + b"b" * 30 + b"\n")
    assert (tmp_path / "output.log.1").read_bytes() == b"a" * 30 + b"\n"
    assert (tmp_path / "output.log").read_bytes() == b"b" * 30 + b"\n"
    log.write(b"c" * 120)
    assert (tmp_path / "output.log").read_bytes() == b"c" * 20


def test_a_log_is_continued(tmp_path: Path) -> None:
    (tmp_path / "output.log").write_bytes(b"before\n")
    RotatingFile(tmp_path / "output.log", max_bytes=100).write(b"after\n")
    assert (tmp_path / "output.log").read_bytes() == b"before\nafter\n"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 KiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("mounting a small file system takes root")
    mounting = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)]
    if subprocess.run(mounting, check=False, capture_output=True).returncode:
        pytest.skip("this machine does not let tests mount a file system")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def test_a_full_disk_is_said_when_it_has_room_again(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(32768))
    sink = Sink(RotatingFile(small_disk / "output.log", max_bytes=1 << 20).write, name="log")
    sink.start()
    sink.offer(b"x" * 65536 + b"\n")
    assert sink.flush(PATIENCE)
    assert 0 < sink.dropped < 65537
    dropped = sink.dropped
    sink.offer(b"lost\n")
    assert sink.flush(PATIENCE)
    assert sink.dropped == dropped + 5
    ballast.unlink()
    sink.offer(b"kept\n")
    assert sink.flush(PATIENCE)
    text = (small_disk / "output.log").read_text()
    assert text.endswith(
        f"perdure: {dropped + 5:,} bytes of output are missing here: the disk was full or slow\nkept\n"
    )


def test_a_file_that_takes_only_a_part_says_how_much(small_disk: Path) -> None:
    log = RotatingFile(small_disk / "output.log", max_bytes=1 << 20)
    with pytest.raises(PartlyWritten) as refused:
        log.write(bytes(100_000))
    assert refused.value.written == (small_disk / "output.log").stat().st_size


def test_a_disk_that_hangs_delays_nothing_and_loses_what_exceeds_the_buffer() -> None:
    released = threading.Event()
    written: list[bytes] = []

    def write(data: bytes) -> None:
        released.wait()
        written.append(data)

    sink = Sink(write, name="log", capacity=1000)
    sink.start()
    sink.offer(b"first")
    began = time.monotonic()
    for _ in range(50):
        sink.offer(b"y" * 100)
    # The first of those without room has waited, and none after it.
    assert time.monotonic() - began < 20 * capture_module.PATIENCE.total_seconds()
    assert not sink.flush(timedelta(milliseconds=1))
    released.set()
    assert sink.flush(PATIENCE)
    output, notice = b"".join(written).split(b"perdure: ")
    assert sink.dropped + len(output) == 5005
    # One buffer waits, and at most one is being written.
    assert sink.dropped >= 5005 - 2 * 1000
    assert notice == f"{sink.dropped:,} bytes of output are missing here: the disk was full or slow\n".encode()


def test_a_disk_that_is_busy_for_a_moment_loses_nothing() -> None:
    written: list[bytes] = []
    takes = threading.Semaphore(0)

    def write(data: bytes) -> None:
        takes.acquire()
        written.append(data)

    sink = Sink(write, name="log", capacity=1000)
    sink.start()
    for _ in range(50):
        sink.offer(b"y" * 100)
        takes.release()
    assert sink.flush(PATIENCE)
    assert (sink.dropped, b"".join(written)) == (0, b"y" * 5000)


def test_the_tail_is_of_the_attempt_and_cut_at_a_line(tmp_path: Path) -> None:
    capture = Capture(logs=tmp_path, max_bytes=1 << 20, stdout=False)
    capture.start()
    for attempt in ("one", "two"):
        output = capture.open()
        os.write(output.write_end, f"attempt {attempt}: grüße\n".encode() * 1000)
        output.close_write_end()
        output.drain(PATIENCE)
        assert 3900 < len(output.tail) <= TAIL_CHARACTERS
        assert set(output.tail.splitlines()) == {f"attempt {attempt}: grüße"}
    capture.flush(PATIENCE)
    assert len((tmp_path / "output.log").read_text().splitlines()) == 2000


def test_output_is_also_copied_to_stdout_where_that_is_wanted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capture = Capture(logs=tmp_path, max_bytes=1 << 20, stdout=True)
    capture.start()
    capture.write(b"seen\n")
    capture.flush(PATIENCE)
    assert capfd.readouterr().out == "seen\n"
