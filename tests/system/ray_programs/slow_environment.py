"""A runtime environment of Ray that is never built: `{"slow": PATH}`, with a file that says that it is being built."""

# Ray is not installed where this is checked.

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from ray._private.runtime_env.plugin import RuntimeEnvPlugin


class SlowEnvironment(RuntimeEnvPlugin):
    """Ray's agents on the machines load it, where RAY_RUNTIME_ENV_PLUGINS names it."""

    name = "slow"

    async def create(self, uri: Any, runtime_env: Any, context: Any, logger: Any) -> float:
        Path(runtime_env["slow"]).touch()
        await asyncio.Event().wait()
        return 0.0
