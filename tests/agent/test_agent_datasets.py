"""Tests of an agent that exchanges with datasets on behalf of its ranks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import WorkflowHandle
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from perdure.agent import datasets
from perdure.agent.datasets import Datasets, RankRequest
from perdure.agent.outbox import ControlPlaneBusy, DestinationNotFound
from perdure.agent.pump import NotNow, RefusedRequest
from perdure.agent.transport import UpdateRefused
from perdure.contract import (
    DatasetAnswer,
    DatasetNeeded,
    DatasetParameters,
    DatasetRequest,
    ShardAnswer,
    ShardRequest,
    Term,
)
from perdure.contract.datasets import Spans
from perdure.contract.names import dataset_workflow_id
from perdure.workflows.companion import JobOwner
from perdure.workflows.dataset import Dataset, DatasetInput
from perdure.workflows.policy.services.datasets import DatasetState
from tests.agent.bench import IDENTITY, Bench
from tests.agent.harness import RunningAgent, Workflows, recording, running_agent
from tests.support.temporal_server import DevServer, dev_server
from tests.support.waiting import DEADLINE, eventually

PARAMETERS = DatasetParameters(size=100, shard_size=10)


@asynccontextmanager
async def dataset(workflows: Workflows, uid: str) -> AsyncIterator[WorkflowHandle[Any, Any]]:
    """The workflow of the dataset `train` of the recording job."""
    queue = f"dataset-{secrets.token_hex(4)}"
    job = workflows.job
    assert job.first_execution_run_id
    owner = JobOwner(job_id=job.id, job_first_run_id=job.first_execution_run_id, check=timedelta(seconds=30))
    runner = UnsandboxedWorkflowRunner()
    async with Worker(workflows.client, task_queue=queue, workflows=[Dataset], workflow_runner=runner):
        handle = await workflows.client.start_workflow(
            Dataset.run,
            DatasetInput(owner=owner, uid=uid, name="train", state=DatasetState(parameters=PARAMETERS)),
            id=dataset_workflow_id(job.id, uid, "train"),
            task_queue=queue,
        )
        yield handle
        await handle.terminate()


def body(generation: int = 1, *, rank: int = 0, **request: Any) -> RankRequest:
    return RankRequest(
        parameters=PARAMETERS, term=Term(generation=generation), request=ShardRequest(rank=rank, **request)
    )


async def ask(agent: RunningAgent, one: RankRequest) -> tuple[int, dict[str, Any]]:
    return await agent.request("POST", "/v1/datasets/train", one.model_dump(mode="json"))


async def granted(agent: RunningAgent, one: RankRequest) -> Spans:
    """The shards that a rank gets, however often it has to ask."""

    async def answer() -> Spans | None:
        status, content = await ask(agent, one)
        if status == 503:
            return None
        assert status == 200, content
        return ShardAnswer.model_validate(content).granted

    return await eventually(answer)


async def test_an_agent_has_a_dataset_started_and_passes_on_what_its_ranks_need(
    temporal_server: DevServer, tmp_path_factory: pytest.TempPathFactory
):
    async with (
        recording(temporal_server) as workflows,
        running_agent(temporal_server, workflows, tmp_path_factory.mktemp("n")) as agent,
    ):
        await agent.desire(world=agent.world(1))
        first = asyncio.create_task(granted(agent, body(shards=2)))
        (needed,) = await workflows.expect(workflows.group, "dataset_needed")
        assert (needed["name"], needed["parameters"]["size"]) == ("train", 100)
        assert needed["sender"] == agent.node.model_dump()
        async with dataset(workflows, agent.node.uid):
            assert await first == ((0, 20),)
            await agent.kill()
            await agent.start()
            assert await granted(agent, body(shards=1, holds=((0, 20),))) == ((20, 30),), "it kept nothing to lose"
            await agent.desire(world=agent.world(2))
            assert await granted(agent, body(2, shards=1)) == ((0, 10),)
            status, old = await ask(agent, body(1, shards=1))
            assert (status, old["superseded"]) == (200, True)


async def test_ranks_wait_while_the_server_is_away(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path):
    async with (
        dev_server(tmp_path / "temporal.db") as server,
        recording(server) as workflows,
        running_agent(server, workflows, tmp_path_factory.mktemp("n")) as agent,
    ):
        await agent.desire(world=agent.world(1))
        async with dataset(workflows, agent.node.uid):
            assert await granted(agent, body(shards=1)) == ((0, 10),)
            server.kill()
            waiting = asyncio.create_task(granted(agent, body(shards=1, done=((0, 10),))))
            await server.restart()
            assert await waiting == ((10, 20),)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (body(3), "not a world of this node"),
        (body(rank=1), "not a rank of this node"),
        (b"{", "Invalid JSON"),
        (b'{"parameters": {"size": 0, "shard_size": 1}}', "parameters.size"),
        (body(holds=((0, 10),)).model_dump_json().replace("[0,10]", "[10,0]").encode(), "request.holds"),
        (body(holds=((0, 10),)).model_dump_json().replace("[0,10]", "[0,5],[3,9]").encode(), "request.holds"),
        (
            body().model_dump_json().replace('"holds":[]', f'"holds":{[[n, n + 1] for n in range(300)]}').encode(),
            "holds",
        ),
    ],
)
async def test_what_a_rank_must_not_send_is_refused(tmp_path: Path, one: RankRequest | bytes, expected: str):
    bench = Bench(tmp_path)
    bench.apply(2)
    content = (
        one if isinstance(one, bytes) else one.model_copy(update={"term": _later(one.term)}).model_dump_json().encode()
    )
    with pytest.raises(RefusedRequest, match=expected):
        await bench.datasets.exchange("train", content)


def _later(term: Term) -> Term:
    return term.model_copy(update={"generation": term.generation + 1})


@pytest.mark.parametrize("name", ["", "0", "a/b", "../x", "ä", "x" * 64])
async def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str):
    bench = Bench(tmp_path)
    bench.apply(1)
    with pytest.raises(RefusedRequest, match="not the name of a dataset"):
        await bench.datasets.exchange(name, body().model_dump_json().encode())


class PlayedDataset:
    """Answers when the test lets it, and fails as often as it says."""

    def __init__(self, errors: Sequence[Exception] = ()) -> None:
        self.errors = list(errors)
        self.requests: list[DatasetRequest] = []
        self.superseded = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def exchange(self, name: str, request: DatasetRequest) -> DatasetAnswer:
        self.requests.append(request)
        await self.may_answer.wait()
        if self.errors:
            raise self.errors.pop(0)
        if self.superseded:
            return DatasetAnswer(ranks=tuple(ShardAnswer(superseded=True) for _ in request.ranks))
        return DatasetAnswer(ranks=tuple(ShardAnswer(granted=((one.rank, one.rank + 1),)) for one in request.ranks))


class Ranks:
    """The ranks 0 to 3 of one node."""

    def __init__(self, tmp_path: Path, played: PlayedDataset) -> None:
        self.bench = Bench(tmp_path)
        self.bench.apply(1)
        self.bench.node.state.processes = 4
        self.datasets = Datasets(
            IDENTITY, send=played.exchange, state=lambda: self.bench.node.state, to_group=self.bench.group.put
        )

    def ask(self, rank: int = 0, generation: int = 1, **request: Any) -> asyncio.Task[ShardAnswer]:
        one = body(generation, rank=rank, **request)
        return asyncio.create_task(self.datasets.exchange("train", one.model_dump_json().encode()))


async def test_requests_that_arrive_during_an_exchange_are_sent_together(tmp_path: Path):
    played = PlayedDataset()
    ranks = Ranks(tmp_path, played)
    played.may_answer.clear()
    first = ranks.ask(0)
    await eventually(lambda: len(played.requests) == 1)
    others = [ranks.ask(rank) for rank in (1, 2, 3)]
    await asyncio.gather(*(asyncio.sleep(0) for _ in others))
    played.may_answer.set()
    answers = await asyncio.gather(first, *others)
    assert [answer.granted for answer in answers] == [((rank, rank + 1),) for rank in range(4)]
    assert [len(request.ranks) for request in played.requests] == [1, 3]


async def test_a_rank_s_newer_request_replaces_its_older_one(tmp_path: Path):
    played = PlayedDataset()
    ranks = Ranks(tmp_path, played)
    played.may_answer.clear()
    first = ranks.ask(0)
    await eventually(lambda: len(played.requests) == 1)
    older, newer = ranks.ask(1, shards=1), ranks.ask(1, shards=2)
    with pytest.raises(NotNow):
        await older
    played.may_answer.set()
    await asyncio.gather(first, newer)
    assert [one.shards for one in played.requests[1].ranks] == [2]


async def test_whatever_fails_is_tried_again_and_a_missing_dataset_is_requested_once(tmp_path: Path):
    missing = DestinationNotFound("it does not exist")
    played = PlayedDataset([missing, ControlPlaneBusy("late"), OSError("no route"), missing])
    ranks = Ranks(tmp_path, played)
    assert (await ranks.ask()).granted == ((0, 1),)
    assert [needed.name for needed in ranks.bench.group.of(DatasetNeeded)] == ["train"]


async def test_a_refusal_reaches_the_rank(tmp_path: Path):
    ranks = Ranks(tmp_path, PlayedDataset([UpdateRefused("the sender is not a node of this job")]))
    assert (await ranks.ask()).refused == "the sender is not a node of this job"


async def test_a_rank_is_told_to_ask_again_while_nothing_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets, "ANSWER_WITHIN", 0.05)
    played = PlayedDataset()
    played.may_answer.clear()
    ranks = Ranks(tmp_path, played)
    with pytest.raises(NotNow):
        await ranks.ask()
    monkeypatch.undo()
    played.may_answer.set()
    assert (await ranks.ask()).granted == ((0, 1),)


async def test_a_process_that_continues_in_a_newer_world_reads_on_there(tmp_path: Path):
    played = PlayedDataset()
    ranks = Ranks(tmp_path, played)
    ranks.bench.apply(2, keeps_processes=True)
    ranks.bench.apply(3, keeps_processes=True)
    answers = await asyncio.gather(ranks.ask(0, generation=1), ranks.ask(1, generation=2), ranks.ask(2, generation=3))
    assert [answer.granted for answer in answers] == [((0, 1),), ((1, 2),), ((2, 3),)]
    (request,) = played.requests
    assert (request.term, request.keeps_processes) == (Term(generation=3), True)
    assert [one.continues for one in request.ranks] == [True, True, False]


async def test_a_process_that_continues_asks_again_where_another_node_was_in_a_newer_world_first(tmp_path: Path):
    played = PlayedDataset()
    ranks = Ranks(tmp_path, played)
    ranks.bench.apply(2, keeps_processes=True)
    played.superseded = True
    with pytest.raises(NotNow, match="newest world"):
        await ranks.ask(generation=2)
    played.superseded = False
    ranks.bench.apply(3, keeps_processes=True)
    assert (await ranks.ask(generation=2)).granted


async def test_a_request_that_waits_in_a_world_that_ends_is_answered_so(tmp_path: Path):
    played = PlayedDataset([OSError("no route")])
    played.may_answer.clear()
    ranks = Ranks(tmp_path, played)
    waiting = ranks.ask()
    await eventually(lambda: len(played.requests) == 1)
    ranks.bench.apply(2)
    played.may_answer.set()
    assert (await asyncio.wait_for(waiting, DEADLINE)).superseded
    assert len(played.requests) == 1
