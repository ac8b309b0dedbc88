"""Tests of the routes of agents' messages: each leads to a handler that reads it, and shows people what it reports."""

from __future__ import annotations

import pytest
from temporalio import workflow

from perdure.contract import Destination, routed_to
from perdure.workflows.dataset import Dataset
from perdure.workflows.node_group import NodeGroup
from perdure.workflows.store import KeyValueStore
from perdure.workflows.training_job import TrainingJob


@pytest.mark.parametrize(
    ("destination", "receiver"),
    [
        (Destination.JOB, TrainingJob),
        (Destination.GROUP, NodeGroup),
        (Destination.DATASET, Dataset),
        (Destination.STORE, KeyValueStore),
    ],
)
def test_each_message_of_agents_has_a_handler_of_its_type(destination: Destination, receiver: type) -> None:
    handlers = workflow._Definition.must_from_class(receiver)
    for name, kind in routed_to(destination).items():
        handler = handlers.signals.get(name) or handlers.updates[name]
        assert handler.arg_types == [kind]
        assert handler.description


def test_a_handler_that_only_changes_the_table_is_described_by_its_message() -> None:
    signals = workflow._Definition.must_from_class(NodeGroup).signals
    assert signals["ready"].description == "The node's command waits for a world"
