from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.agent.harness import Workflows, recording
from tests.gateway.attacker import Attacker
from tests.gateway.site import GatewaySite, gateway_site
from tests.support.temporal_server import DevServer


@pytest.fixture
async def workflows(temporal_server: DevServer) -> AsyncIterator[Workflows]:
    async with recording(temporal_server) as both:
        yield both


@pytest.fixture
async def site(temporal_server: DevServer) -> AsyncIterator[GatewaySite]:
    async with gateway_site(temporal_server) as site:
        yield site


@pytest.fixture
async def attacker(site: GatewaySite, workflows: Workflows) -> Attacker:
    grant = site.grant(workflows, uid="aaaaaaaa")
    return Attacker(site, workflows, await site.client(grant, site.token(grant)))
