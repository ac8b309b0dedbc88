"""What NVIDIA's own program reports of the first GPU."""

from __future__ import annotations

import subprocess


def reported(*fields: str) -> dict[str, str]:
    """Asks `nvidia-smi` for fields of its `--query-gpu`; sizes are in MiB, power in watts."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(zip(fields, (value.strip() for value in printed.split(",")), strict=True))


def used_mib() -> int:
    """Memory of the GPU that any process uses."""
    return int(reported("memory.used")["memory.used"])
