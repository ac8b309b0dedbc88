"""Payloads that others have written: users start workflows, and agents report, with programs of their own."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from temporalio.api.common.v1 import Payload
from temporalio.client import Client, WorkflowHandle
from temporalio.common import RawValue
from temporalio.converter import DataConverter

from perdure.activities.cluster.jobs import OpenJobs
from perdure.activities.history.activities import HistoryActivities
from perdure.activities.history.answers import answer
from perdure.activities.history.store import HistoryStore
from perdure.base.encryption.codec import PayloadEncryption
from perdure.base.encryption.keys import create_keys
from perdure.base.executions import find
from perdure.base.payloads import UnreadablePayload, first_value
from perdure.contract import HistoryRequest, LeaseView
from perdure.contract.names import TRAINING_JOB
from tests.support.waiting import eventually


def payload(content: bytes, encoding: bytes = b"json/plain") -> Payload:
    return Payload(metadata={"encoding": encoding}, data=content)


FOREIGN = {
    "an unknown encoding": payload(b"x", b"x/y"),
    "no JSON": payload(b"{"),
    "nested too deep": payload(b"[" * 300 + b"]" * 300),
    "no message of protobuf": payload(b"\xff", b"binary/protobuf"),
    "encrypted with another key": None,
}


async def foreign(kind: str, folder: Path, converter: DataConverter) -> Payload:
    if found := FOREIGN[kind]:
        return found
    other = PayloadEncryption.of(create_keys(folder / "other.json")).data_converter
    (encrypted,) = await other.encode([{"name": "llama"}])
    return encrypted


async def connected(client: Client, converter: DataConverter) -> Client:
    address = client.service_client.config.target_host
    return await Client.connect(address, namespace=client.namespace, data_converter=converter)


@pytest.fixture
async def client(temporal_client: Client) -> Client:
    """A connection with the converter of workers and commands."""
    return await connected(temporal_client, PayloadEncryption.of(None).data_converter)


async def start(client: Client, given: Payload, queue: str) -> WorkflowHandle[object, object]:
    """Starts what claims to be a job; no worker takes it."""
    plain = await connected(client, replace(client.data_converter, payload_codec=None))
    return await plain.start_workflow(TRAINING_JOB, RawValue(given), id=f"job/nlp/{uuid4().hex[:8]}", task_queue=queue)


@pytest.mark.parametrize("kind", FOREIGN)
async def test_a_job_whose_specification_cannot_be_read_stops_no_look_at_the_others(
    client: Client, tmp_path: Path, kind: str
):
    queue = f"foreign-{uuid4().hex[:8]}"
    handle = await start(client, await foreign(kind, tmp_path, client.data_converter), queue)
    jobs = OpenJobs(client, task_queue=queue, backend="local", with_nodes=False)

    async def is_listed() -> bool:
        await jobs.look()
        return bool(jobs._known)

    await eventually(is_listed)
    assert (jobs.roles, jobs.problem) == ((), "")
    store = HistoryStore(f"sqlite:///{tmp_path / 'history.db'}", tenant=client.namespace)
    store.prepare()
    recorder = HistoryActivities(client, store, task_queue=queue, retention=timedelta(days=1))
    found = await find(client, handle.id)
    assert found is not None
    assert await recorder._record_all([found], asks=False) == []
    assert answer(store, HistoryRequest(namespace="nlp")).found == 1
    store.close()


@pytest.mark.parametrize("kind", FOREIGN)
async def test_what_cannot_be_read_is_one_error(client: Client, tmp_path: Path, kind: str):
    given = await foreign(kind, tmp_path, client.data_converter)
    with pytest.raises(UnreadablePayload):
        await first_value(client, "job/nlp/llama", [given])


@pytest.mark.parametrize(
    "given", [payload(b'{"rank": "a"}'), payload(b"x", b"binary/plain"), payload(b"", b"binary/null")]
)
async def test_a_value_of_another_type_is_no_view(client: Client, given: Payload):
    with pytest.raises(UnreadablePayload):
        await first_value(client, "group/nlp/llama", [given], LeaseView)


async def test_nothing_at_all_is_unreadable(client: Client):
    with pytest.raises(UnreadablePayload):
        await first_value(client, "job/nlp/llama", [])
