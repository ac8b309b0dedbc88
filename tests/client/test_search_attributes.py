"""Tests that a worker serves jobs only once the server accepts the attributes that they set."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import pytest
from temporalio.api.operatorservice.v1 import (
    AddSearchAttributesRequest,
    ListSearchAttributesResponse,
    RemoveSearchAttributesRequest,
)
from temporalio.client import Client as TemporalClient
from temporalio.service import RPCError, RPCStatusCode

from perdure.activities.site import SiteActivities
from perdure.client import search_attributes
from perdure.client.search_attributes import SEARCH_ATTRIBUTES, register_search_attributes
from perdure.client.task_failures import failures_among, remedy
from perdure.contract import SiteFacts
from perdure.worker import _following_attributes
from perdure.workflows.search_attributes import JOB_PHASE
from tests.support.temporal_server import dev_server
from tests.support.waiting import eventually
from tests.workflows.fleet import job_spec, running_fleet, submit
from tests.workflows.jobs import running


class LateServer:
    """Lists attributes as soon as they are added, and accepts them in queries some questions later."""

    namespace = "new"

    def __init__(self, *, refuses: int, status: RPCStatusCode = RPCStatusCode.INVALID_ARGUMENT) -> None:
        self.operator_service = self
        self.refuses = refuses
        self.questions = 0
        self._status = status
        self._known = ListSearchAttributesResponse()

    async def list_search_attributes(self, _request: Any) -> ListSearchAttributesResponse:
        return self._known

    async def add_search_attributes(self, request: AddSearchAttributesRequest) -> None:
        self._known.custom_attributes.update(request.search_attributes)

    async def count_workflows(self, query: str) -> None:
        assert all(name in query for name in SEARCH_ATTRIBUTES)
        self.questions += 1
        if self.questions <= self.refuses:
            raise RPCError("invalid query: column name 'JobPhase' is not a valid search attribute", self._status, b"")


class ForbiddingServer(LateServer):
    """Lets administrators add attributes only."""

    def __init__(self) -> None:
        super().__init__(refuses=0)
        self.refused = 0
        self._refused_request = AddSearchAttributesRequest()

    async def add_search_attributes(self, request: AddSearchAttributesRequest) -> None:
        self.refused += 1
        self._refused_request = request
        raise RPCError("administrators only", RPCStatusCode.PERMISSION_DENIED, b"")

    async def add(self) -> None:
        """An administrator adds what was requested."""
        await super().add_search_attributes(self._refused_request)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_attributes, "_LOOK_AGAIN", timedelta())


async def test_attributes_that_were_added_are_awaited() -> None:
    server = LateServer(refuses=3)
    assert await register_search_attributes(cast(TemporalClient, server)) == ""
    assert server.questions == 4


async def test_attributes_that_there_were_are_not_asked_for() -> None:
    server = LateServer(refuses=0)
    await register_search_attributes(cast(TemporalClient, server))
    server.questions = 0
    assert await register_search_attributes(cast(TemporalClient, server)) == ""
    assert server.questions == 0


async def test_jobs_set_attributes_that_an_administrator_adds_while_the_worker_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search_attributes, "_ASK_AGAIN", timedelta())
    server = ForbiddingServer()
    client = cast(TemporalClient, server)
    assert await register_search_attributes(client) == "PERMISSION_DENIED: administrators only"
    facts = SiteFacts(search_attributes=False, backends=("local",))
    site = SiteActivities(facts)
    async with _following_attributes(client, site, facts):
        await eventually(lambda: server.refused > 2, what="the worker asks again")
        assert await site.site_facts() == facts
        await server.add()

        async def known() -> bool:
            return await site.site_facts() == facts.replace(search_attributes=True)

        await eventually(known)


async def test_attributes_that_may_not_be_added_again_are_not_set_by_jobs_that_begin_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(search_attributes, "_ASK_AGAIN", timedelta())
    facts = SiteFacts(search_attributes=True)
    site = SiteActivities(facts)
    async with _following_attributes(cast(TemporalClient, ForbiddingServer()), site, facts):

        async def known() -> bool:
            return not (await site.site_facts()).search_attributes

        await eventually(known)
    assert "open jobs decide nothing until an administrator has" in caplog.text


async def test_a_server_that_is_away_says_nothing_about_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_attributes, "_ASK_AGAIN", timedelta())

    class AwayServer(LateServer):
        async def list_search_attributes(self, _request: Any) -> ListSearchAttributesResponse:
            self.questions += 1
            raise RPCError("away", RPCStatusCode.UNAVAILABLE, b"")

    server, facts = AwayServer(refuses=0), SiteFacts(search_attributes=True)
    site = SiteActivities(facts)
    async with _following_attributes(cast(TemporalClient, server), site, facts):
        await eventually(lambda: server.questions > 2)
        assert await site.site_facts() == facts


async def test_a_job_whose_attribute_is_removed_continues_when_its_worker_has_added_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with dev_server() as server:
        temporal = await server.client()
        assert await register_search_attributes(temporal) == ""
        request = RemoveSearchAttributesRequest(namespace=temporal.namespace, search_attributes=[JOB_PHASE.name])
        await temporal.operator_service.remove_search_attributes(request)
        async with running_fleet(temporal) as fleet:
            job = await submit(fleet, job_spec("1"))

            async def failing() -> str:
                failures = await failures_among(temporal, [job.id])
                return next((remedy(one) for one in failures.values()), "")

            assert "search attributes" in await eventually(failing)
            monkeypatch.setattr(search_attributes, "_ASK_AGAIN", timedelta())
            facts = SiteFacts(search_attributes=True)
            async with _following_attributes(temporal, SiteActivities(facts), facts):
                await running(job, nodes=1)


@pytest.mark.parametrize("status", [RPCStatusCode.INVALID_ARGUMENT, RPCStatusCode.PERMISSION_DENIED])
async def test_jobs_do_without_attributes_that_are_never_accepted(
    monkeypatch: pytest.MonkeyPatch, status: RPCStatusCode
) -> None:
    monkeypatch.setattr(search_attributes, "_KNOWN_WITHIN", timedelta())
    server = LateServer(refuses=1_000_000, status=status)
    assert await register_search_attributes(cast(TemporalClient, server)) == (
        f"{status.name}: invalid query: column name 'JobPhase' is not a valid search attribute"
    )
