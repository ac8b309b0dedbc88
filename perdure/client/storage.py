"""Opens folders of storages for reading: what jobs have left there."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from perdure.agent.local_files import open_storage
from perdure.base.own_threads import Occupied, OwnThreads

_AT_ONCE = 16
"""Pieces of work at one place at a time. A place that hangs keeps as many threads."""
_PATIENCE = 60.0
"""Seconds for which further work at that place waits for its turn."""

_Result = TypeVar("_Result")

_threads = OwnThreads("storage", most=_AT_ONCE)


async def at_storage(place: str, work: Callable[[], _Result]) -> _Result:
    """Returns the result of work that waits for a storage. One that hangs takes no thread that serves something else.

    Args:
        place: The URL of the place: all work at it is bounded together.
        work: The work.

    Raises:
        TimeoutError: if earlier work at that place does not end.
    """
    try:
        return await _threads.run(place, work, patience=_PATIENCE)
    except Occupied as busy:
        raise TimeoutError(f"{place} does not answer: {busy}") from None


def open_folder(url: str, *, within: str | None = None) -> tuple[Any, str]:
    """Returns a file system of fsspec, and the path of a folder in it.

    Args:
        url: The folder.
        within: The URL of a folder above it, which whoever runs this process has named. Below it others write, who
            have not the rights of this process: no link there is followed, and only storages are opened that agents
            of pods would open. None: whoever asks has these rights.

    Raises:
        ValueError: if it is none of these storages, or a chain of file systems: what stands at the URL could name any
            other file.
    """
    if within is not None:
        files, root = open_storage(within, contained=True)
        return files, f"{root}{url.removeprefix(within.rstrip('/'))}"
    if "::" in url:
        raise ValueError(f"{url} chains file systems; expected the URL of one, such as file:///folder")
    fsspec: Any = importlib.import_module("fsspec.core")
    files, root = fsspec.url_to_fs(url, use_listings_cache=False)
    return files, str(root).rstrip("/")
