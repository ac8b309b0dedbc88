"""Reads the node's log in pieces, for users who can reach only the node's agent."""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from perdure.agent.files import LogFile, log_files
from perdure.contract.logs import LONGEST_LINE, LineTime, LogChunk, LogPosition
from perdure_launcher.log_times import line_times, offset_since

CHUNK_BYTES = 256 * 1024
"""Bytes of one answer: below Temporal's warning threshold (512 KiB), and below its limit (2 MiB) with any JSON
escaping."""
_EARLIEST, _LATEST = 0.0, datetime(9999, 1, 1, tzinfo=UTC).timestamp()
"""Times that a log can have, in seconds since 1970."""
_BLOCK = 64 * 1024
_LONGEST_SEARCH = 64 * 1024 * 1024
"""Bytes of one file that are searched for line breaks: a log without any may be of any size."""


def end_of_log(run_dir: Path) -> LogPosition | None:
    """Returns the current end of the log; None if there is no output yet."""
    files = log_files(run_dir)
    return _position(files[-1], files[-1].size) if files else None


def read_log(
    run_dir: Path,
    *,
    position: LogPosition | None = None,
    lines: int | None = None,
    since: datetime | None = None,
    limit: int = CHUNK_BYTES,
    whole_characters: bool = False,
) -> LogChunk:
    """Reads the log's next piece.

    Args:
        run_dir: The node's run directory.
        position: The position to begin at; parts that have been rotated away are left out.
        lines: Without a position, the number of last lines to begin with; None for all.
        since: Without a position, begin with what was printed then, unless `lines` begins later.
        limit: The maximum number of bytes to read.
        whole_characters: Whether to leave a character at the end of the log until all of it is written.

    Raises:
        OSError: if the log cannot be read.
    """
    files = log_files(run_dir)
    if not files:
        return LogChunk()
    index, offset = _place(files, position, lines, since)
    while offset >= files[index].size and index + 1 < len(files):
        index, offset = index + 1, 0
    with files[index].open() as log:
        log.seek(offset)
        content = log.read(limit)
        newest = index + 1 == len(files)
        text, taken = _decode(content, whole=whole_characters and newest)
        held = len(content) - taken if whole_characters else 0
        times = _times(files[index], offset, content[:taken])
        offset += taken
        left_out = 0
        if taken > LONGEST_LINE and b"\n" not in content:
            left_out = _middle_of_line(log, offset)
            offset += left_out
    at_end = newest and offset + held >= files[index].size
    position = _position(files[index], offset)
    return LogChunk(text=text, times=times, position=position, left_out=left_out, at_end=at_end)


def _position(file: LogFile, offset: int) -> LogPosition:
    head = 0
    with contextlib.suppress(OSError):
        head = file.head(offset)
    return LogPosition(file=file.inode, offset=offset, head=head)


def _middle_of_line(log: BinaryIO, offset: int) -> int:
    """Returns the number of bytes from there on that no view shows of this line: all but its end, which may be what a
    progress bar has written last."""
    log.seek(offset)
    length = 0
    while block := log.read(_BLOCK):
        if (line_end := block.find(b"\n")) >= 0:
            length += line_end
            break
        length += len(block)
    return max(length - LONGEST_LINE, 0)


def printed_times(file: LogFile, begin: int, content: bytes) -> list[tuple[int, float]]:
    """Returns when the lines of a file's piece were printed: the number of a line in the piece, and the time in seconds
    since 1970 of it and of those that follow. The index comes from the side of the training code: what is no time in it
    is left out."""
    times: list[tuple[int, float]] = []
    line = 0
    with contextlib.suppress(OSError), file.open_times() as index:
        # An index is thinned out to a thousand times for a piece.
        for offset in range(0, len(content), CHUNK_BYTES):
            piece = content[offset : offset + CHUNK_BYTES]
            found = line_times(index, begin + offset, piece)
            times += [(line + number, moment) for number, moment in found if _EARLIEST <= moment <= _LATEST]
            line += piece.count(b"\n")
    return times


def _times(file: LogFile, begin: int, content: bytes) -> tuple[LineTime, ...]:
    found = printed_times(file, begin, content)
    return tuple(LineTime(line=line, at=datetime.fromtimestamp(moment, UTC)) for line, moment in found)


def _place(
    files: Sequence[LogFile], position: LogPosition | None, lines: int | None, since: datetime | None
) -> tuple[int, int]:
    if position is not None:
        # The file may have been rotated away, and a newer file may have its inode.
        known = [file.holds(inode=position.file, offset=position.offset, head=position.head) for file in files]
        return (known.index(True), position.offset) if any(known) else (0, 0)
    by_lines = (0, 0) if lines is None else _last_lines(files, lines)
    return by_lines if since is None else max(by_lines, _since(files, since))


def _since(files: Sequence[LogFile], since: datetime) -> tuple[int, int]:
    """Returns the position of the first byte that was printed then or later. What has no index counts as later."""
    for index, file in enumerate(files):
        try:
            with file.open_times() as times:
                offset = offset_since(times, since.timestamp())
        except OSError:
            return index, 0
        if offset is not None and offset < file.size:
            return index, offset
    return len(files) - 1, files[-1].size


def _last_lines(files: Sequence[LogFile], count: int) -> tuple[int, int]:
    """Returns the position at which the last lines begin."""
    if not count:
        return len(files) - 1, files[-1].size
    # The line break at the end of the file does not begin a line.
    left = count + 1 if _ends_with_line_break(files[-1]) else count
    for index in range(len(files) - 1, -1, -1):
        with files[index].open() as log:
            end = files[index].size
            earliest = max(0, end - _LONGEST_SEARCH)
            while end > earliest:
                begin = max(0, end - _BLOCK)
                log.seek(begin)
                block = log.read(end - begin)
                at = len(block)
                while (at := block.rfind(b"\n", 0, at)) >= 0:
                    left -= 1
                    if left <= 0:
                        return index, begin + at + 1
                end = begin
        if earliest:
            return index, earliest
    return 0, 0


def _ends_with_line_break(file: LogFile) -> bool:
    with file.open() as log:
        log.seek(max(0, file.size - 1))
        return log.read(1) == b"\n"


def _decode(content: bytes, *, whole: bool) -> tuple[str, int]:
    """Returns the text and the number of its bytes: a character that is split in two is left for the next piece. Unless
    it must be `whole`, it is replaced where there is nothing else."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(content)
    rest, _ = decoder.getstate()
    if rest and len(rest) == len(content) and not whole:
        # There is nothing else: the next piece would never get past it.
        return content.decode(errors="replace"), len(content)
    return text, len(content) - len(rest)
