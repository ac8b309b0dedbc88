"""Logs that agents have copied to where `outputs.logs` says: of nodes that are replaced or gone, too."""

from __future__ import annotations

import asyncio
import importlib
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from perdure.errors import LogsUnavailable


class CopiedLog:
    """One incarnation's log, of which nothing new comes."""

    def __init__(self, folder: str, *, rank: int, incarnation: int) -> None:
        """Reads nothing yet.

        Args:
            folder: URL of the folder that holds the log's parts.
            rank: The node's.
            incarnation: The node's.
        """
        self._folder = folder
        self._node = f"{rank}.{incarnation}"

    async def old_lines(self, tail: int | None) -> AsyncGenerator[str]:
        """All that was copied, or its last lines.

        Raises:
            LogsUnavailable: if it cannot be read.
        """
        try:
            content = await asyncio.to_thread(self._content, tail)
        except FileNotFoundError:
            raise LogsUnavailable(
                f"no log of node {self._node} is in {self._folder}",
                remedy="`perdure nodes` shows the newest incarnation of each node.",
            ) from None
        except Exception as error:
            # Whatever storage is behind the URL has errors of its own.
            raise LogsUnavailable(
                f"the log of node {self._node} cannot be read from {self._folder}: {error}",
                remedy="This machine needs the storage's client and credentials, as the nodes do.",
            ) from error
        for line in content.splitlines()[-tail if tail else 0 :] if tail != 0 else ():
            yield line.decode(errors="replace")

    async def new_lines(self) -> AsyncGenerator[str]:
        """Nothing."""
        for line in ():
            yield line

    def last_line(self) -> str:
        """Empty: the reader of all lines reads this one, too."""
        return ""

    def close(self) -> None:
        """Holds nothing."""

    def _content(self, tail: int | None) -> bytes:
        """From the newest part backwards, until there are enough lines."""
        fsspec: Any = importlib.import_module("fsspec.core")
        files, root = fsspec.url_to_fs(self._folder)
        parts: deque[bytes] = deque()
        for part in sorted(files.ls(root, detail=False), reverse=True):
            parts.appendleft(files.cat_file(part))
            if tail is not None and sum(content.count(b"\n") for content in parts) > tail:
                break
        return b"".join(parts)
