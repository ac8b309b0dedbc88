"""Tests that a specification is refused that would not fit into a task of a workflow as often as it is sent."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic_core import to_json

from perdure.contract import NodeCredentials, NodeRequest
from perdure.contract.names import NODES_PER_GROUP
from perdure.spec import validate
from perdure.spec.errors import SpecError
from perdure.spec.validate import MAX_BYTES, MOST_OF_A_TASK, parse_spec

GRPC = 4 * 1024 * 1024


def job(roles: int, *, nodes: int = 1, env: int = 0) -> dict[str, Any]:
    """A job of so many roles, the first with so many nodes, and with so many characters in a variable."""
    named = {f"role-{number}": {"nodes": 1, "command": ["torchrun", "train.py"]} for number in range(roles)}
    named["role-0"]["nodes"] = nodes
    return {"name": "job", "roles": named, "env": {"TEXT": "x" * env}}


@pytest.mark.parametrize(
    "known",
    [job(8, nodes=2_000), job(60), job(1, nodes=2_000, env=MAX_BYTES - 500), job(8, nodes=128, env=MAX_BYTES - 1_500)],
)
def test_jobs_that_fit_are_accepted(known: dict[str, Any]):
    assert parse_spec(known).roles


@pytest.mark.parametrize(
    ("known", "copies"),
    [(job(100), 100), (job(30, nodes=128, env=MAX_BYTES - 4_000), NODES_PER_GROUP)],
    ids=["a group for each of 100 roles", "128 nodes that are requested one by one"],
)
def test_jobs_that_do_not_fit_are_refused_before_the_server_ends_their_workflow(known: dict[str, Any], copies: int):
    with pytest.raises(SpecError, match=f"roles.*it is sent {copies} times in one message"):
        parse_spec(known)


def test_what_is_accepted_fits_also_with_what_is_sent_beside_it():
    spec = parse_spec(job(8, nodes=128, env=MAX_BYTES - 1_500))
    request = NodeRequest(
        node=NodeCredentials(uid="0123abcd", role="role-0", rank=127, incarnation=1, token="t" * 32),
        name="n" * 63,
        task_queue="node/0123abcd/role-0-127/1",
        spec=spec,
        job_id="job/" + "n" * 127,
        job_first_run_id="r" * 36,
        group_id="job/" + "n" * 150,
        nodes_min=128,
    )
    assert NODES_PER_GROUP * len(to_json(request)) < MOST_OF_A_TASK < GRPC


def test_a_group_has_as_many_nodes_as_the_check_takes_it_to_have():
    assert validate._NODES_OF_A_GROUP == NODES_PER_GROUP
