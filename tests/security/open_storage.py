"""Opens a storage as an agent does, and prints what went wrong.

Arguments: `guarded` or `plain`, the agent's folder, the storage.
"""

from __future__ import annotations

import sys
from pathlib import Path

from perdure.agent.storage_credentials import ignore_configuration


def main() -> None:
    """Opens it."""
    mode, private, url = sys.argv[1:]
    if mode == "guarded":
        ignore_configuration(Path(private))
    # It imports fsspec, which reads its configuration then.
    from perdure.agent.local_files import open_storage

    try:
        files, root = open_storage(url, contained=mode == "guarded")
        files.ls(root, detail=False)
    except Exception as error:
        print(type(error).__name__, error)


if __name__ == "__main__":
    main()
