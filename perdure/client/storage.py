"""Opens folders of storages for reading: what jobs have left there."""

from __future__ import annotations

import importlib
from typing import Any

from perdure.agent.local_files import open_storage


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
