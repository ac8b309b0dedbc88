"""Reads the node's log piece by piece, for people who reach no more of the node than its agent."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

from agent.files import LogFile, log_files
from workflows.messages import LogChunk, LogPosition

CHUNK_BYTES = 256 * 1024
"""Of one answer: below what Temporal warns of (512 KiB), and below what it takes (2 MiB) however JSON escapes it."""
_BLOCK = 64 * 1024


def end_of_log(run_dir: Path) -> LogPosition | None:
    """Where the log ends now; None where nothing was printed yet."""
    files = log_files(run_dir)
    return LogPosition(file=files[-1].inode, offset=files[-1].size) if files else None


def read_log(
    run_dir: Path, *, position: LogPosition | None = None, lines: int | None = None, limit: int = CHUNK_BYTES
) -> LogChunk:
    """The log's next piece.

    Args:
        run_dir: Of the node.
        position: Where it begins; what has been rotated away meanwhile is left out.
        lines: Without a position: begin with so many of the last lines; None for all.
        limit: Bytes of the log that are read at most.

    Raises:
        OSError: if the log cannot be read.
    """
    files = log_files(run_dir)
    if not files:
        return LogChunk()
    index, offset = _place(files, position, lines)
    while offset >= files[index].size and index + 1 < len(files):
        index, offset = index + 1, 0
    with files[index].path.open("rb") as log:
        log.seek(offset)
        text, taken = _decoded(log.read(limit))
    offset += taken
    at_end = index + 1 == len(files) and offset >= files[index].size
    return LogChunk(text=text, position=LogPosition(file=files[index].inode, offset=offset), at_end=at_end)


def _place(files: Sequence[LogFile], position: LogPosition | None, lines: int | None) -> tuple[int, int]:
    if position is not None:
        # Rotated away, its number may be a newer file's by now.
        known = [file.inode == position.file and position.offset <= file.size for file in files]
        return (known.index(True), position.offset) if any(known) else (0, 0)
    return (0, 0) if lines is None else _last_lines(files, lines)


def _last_lines(files: Sequence[LogFile], count: int) -> tuple[int, int]:
    """Where the last lines begin."""
    if not count:
        return len(files) - 1, files[-1].size
    # The line break at the very end begins no line.
    left = count + 1 if _ends_with_line_break(files[-1]) else count
    for index in range(len(files) - 1, -1, -1):
        with files[index].path.open("rb") as log:
            end = files[index].size
            while end > 0:
                begin = max(0, end - _BLOCK)
                log.seek(begin)
                block = log.read(end - begin)
                at = len(block)
                while (at := block.rfind(b"\n", 0, at)) >= 0:
                    left -= 1
                    if left <= 0:
                        return index, begin + at + 1
                end = begin
    return 0, 0


def _ends_with_line_break(file: LogFile) -> bool:
    with file.path.open("rb") as log:
        log.seek(max(0, file.size - 1))
        return log.read(1) == b"\n"


def _decoded(content: bytes) -> tuple[str, int]:
    """The text, and the bytes that it took: a character that is cut in two is left for the next piece."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(content)
    rest, _ = decoder.getstate()
    if rest and len(rest) == len(content):
        # Nothing else is there: no next piece would ever get past it.
        return content.decode(errors="replace"), len(content)
    return text, len(content) - len(rest)
