from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.agent.bench import Bench
from tests.agent.harness import Workflows, recording
from tests.support.temporal_server import DevServer


@pytest.fixture
async def workflows(temporal_server: DevServer) -> AsyncIterator[Workflows]:
    async with recording(temporal_server) as both:
        yield both


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)
