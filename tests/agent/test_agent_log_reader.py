"""Tests of reading the log in pieces: last lines, rotations between two pieces, and characters that are split in
two."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from perdure.agent.files import log_tail
from perdure.agent.log_reader import end_of_log, read_log
from perdure.contract import LineTime, LogPosition
from perdure_launcher.supervisor.capture import RotatingFile
from tests.agent.test_agent_logs import Log


def everything(
    run: Path,
    *,
    position: LogPosition | None = None,
    lines: int | None = None,
    since: datetime | None = None,
    limit: int = 7,
) -> str:
    """All pieces from a place on."""
    text, at_end = "", False
    while not at_end:
        chunk = read_log(run, position=position, lines=lines, since=since, limit=limit)
        assert chunk.position != position or chunk.at_end, "a piece leads nowhere"
        text, position, at_end = text + chunk.text, chunk.position, chunk.at_end
    assert position == end_of_log(run)
    return text


def test_a_log_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    assert everything(tmp_path) == ""


@pytest.mark.parametrize("content", ["one\ntwo\nthree\n", "one\ntwo\nthree", "ä€\n🙂🙂🙂\n", "\n\n\n"])
@pytest.mark.parametrize("rotated", [False, True])
def test_the_last_lines_in_pieces_of_any_size(tmp_path: Path, content: str, rotated: bool) -> None:
    log = Log(tmp_path)
    if rotated:
        log.write(b"an older file\n")
        log.rotate()
    log.write(content.encode())
    written = log.all.decode().splitlines(keepends=True)
    # Four bytes are the longest character: no piece is smaller.
    for limit in (4, 5, 1000):
        assert everything(tmp_path, limit=limit) == log.all.decode()
        for count in range(len(written) + 2):
            last = "".join(written[max(0, len(written) - count) :])
            assert everything(tmp_path, lines=count, limit=limit) == last


def test_reading_goes_on_through_rotations_and_past_what_was_rotated_away(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write(b"first\n")
    chunk = read_log(tmp_path)
    assert (chunk.text, chunk.at_end) == ("first\n", True)
    log.write(b"second\n")
    log.rotate()
    log.write(b"third\n")
    assert everything(tmp_path, position=chunk.position) == "second\nthird\n"
    for number in range(5):
        log.rotate()
        log.write(b"%d\n" % number)
    assert everything(tmp_path, position=chunk.position) == "0\n1\n2\n3\n4\n"


def test_a_newer_file_with_the_inode_number_of_a_deleted_one_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write(b"of the deleted file\n" * 5)
    position = end_of_log(tmp_path)
    assert log_tail(tmp_path, 1000, since=position) == ""
    assert everything(tmp_path, position=position) == ""
    log.replace(b"of the newer file\n" * 9)
    assert log_tail(tmp_path, 1000, since=position) == "of the newer file\n" * 9
    assert everything(tmp_path, position=position) == "of the newer file\n" * 9


def test_a_position_from_an_agent_that_knew_no_checksum_is_valid(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write(b"before\n")
    position = end_of_log(tmp_path)
    assert position is not None
    log.write(b"after\n")
    assert everything(tmp_path, position=position.replace(head=0)) == "after\n"


def test_what_is_no_text_is_shown_as_such_and_does_not_stop_the_rest(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write(b"\xe2\x82")
    assert read_log(tmp_path).text == "\ufffd"
    log.write(b"\nafter\n")
    assert everything(tmp_path).endswith("\nafter\n")


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def test_lines_come_with_their_times_and_from_a_time_on(tmp_path: Path) -> None:
    now = [1000.0]
    (tmp_path / "logs").mkdir()
    log = RotatingFile(tmp_path / "logs" / "output.log", max_bytes=10, clock=lambda: now[0])
    for line in (b"one\n", b"two\n", b"three\n", b"four\n"):
        log.write(line)
        now[0] += 10
    older = read_log(tmp_path)
    assert older.text == "one\ntwo\n"
    assert older.times == (LineTime(line=0, at=moment(1000)), LineTime(line=1, at=moment(1010)))
    assert everything(tmp_path, since=moment(1005)) == "two\nthree\nfour\n"
    assert everything(tmp_path, since=moment(1015)) == "three\nfour\n"
    assert everything(tmp_path, since=moment(1005), lines=1) == "four\n"
    assert everything(tmp_path, since=moment(2000)) == ""
    # What has no index may be later.
    (tmp_path / "logs" / "output.times").unlink()
    assert everything(tmp_path, since=moment(1015)) == "three\nfour\n"
    (tmp_path / "logs" / "output.times.2").unlink()
    assert everything(tmp_path, since=moment(1015)) == "one\ntwo\nthree\nfour\n"


@pytest.mark.parametrize("content", [b"\xff" * 16, b"\0" * 8 + b"\0\0\0\0\0\0\xf8\x7f", b"\0" * 8 + b"\x7f" * 8])
def test_an_index_of_the_training_code_that_is_none_does_no_harm(tmp_path: Path, content: bytes) -> None:
    Log(tmp_path).write(b"line\n")
    (tmp_path / "logs" / "output.times").write_bytes(content * 3)
    assert read_log(tmp_path).text == "line\n"
    assert read_log(tmp_path, since=moment(5)).text in ("line\n", "")
