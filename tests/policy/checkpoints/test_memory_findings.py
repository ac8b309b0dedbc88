"""The sentence of an incident that says why memory was not used."""

from __future__ import annotations

import pytest

from perdure.cli.explain import explanation
from perdure.contract import (
    MemoryFinding,
    MemoryOrigin,
    MemoryProblem,
    RestoreSource,
)
from perdure.workflows.policy.checkpoints.memory_findings import describe
from tests.policy.checkpoints.test_commits import restored
from tests.policy.scenario import Scenario

MISSING = MemoryFinding(rank=0, node=0, problem=MemoryProblem.MISSING, origin=MemoryOrigin.NEW)
DAMAGED = MemoryFinding(rank=0, node=1, problem=MemoryProblem.DAMAGED, steps=(1200, 1199))


def interrupted() -> Scenario:
    return Scenario("2", checkpoint={"storage": "file:///ckpt"}).running().rank_killed(1)


def test_the_incident_says_of_each_node_why_its_memory_was_not_used():
    job = interrupted()
    restored(job, generation=2, step=41, source=RestoreSource.STORAGE, memory=(MISSING, DAMAGED))
    incident = job.state.incidents[-1]
    text = (
        "memory was not used for the restore: of rank 0, node 0 has none: its memory began empty, as no predecessor had"
        " left a folder on its machine, and node 1's of steps 1,200, 1,199 are damaged"
    )
    assert incident.evidence[-1].text == text
    assert incident.evidence[-1].rank is None
    assert "memory was not used for the restore" in explanation(incident, job="llama", flag="").plain


def test_what_is_found_damaged_is_evidence_also_where_another_step_is_loaded_from_memory():
    job = interrupted()
    restored(job, generation=2, step=1198, source=RestoreSource.MEMORY, memory=(DAMAGED,))
    text = "not all that was in memory could be loaded: of rank 0, node 1's of steps 1,200, 1,199 are damaged"
    assert job.state.incidents[-1].evidence[-1].text == text


def test_a_restore_of_which_nothing_was_found_adds_no_evidence():
    job = interrupted()
    known = job.state.incidents[-1].evidence
    restored(job, generation=2, step=41, source=RestoreSource.MEMORY)
    assert job.state.incidents[-1].evidence == known


def test_a_step_that_differs_from_another_checkpointers_is_evidence_also_where_nothing_is_loaded():
    job = interrupted()
    restored(job, generation=2, step=41, source=RestoreSource.MEMORY)
    restored(job, generation=2, step=40, source=RestoreSource.MEMORY, apart="'b' continues from 40")
    restored(job, generation=2, step=0, source=RestoreSource.NOTHING, apart="'c' begins anew")
    texts = [one.text for one in job.state.incidents[-1].evidence]
    assert texts[-2:] == ["'b' continues from 40", "'c' begins anew"]


@pytest.mark.parametrize("origin", [None, *MemoryOrigin])
@pytest.mark.parametrize("problem", list(MemoryProblem))
def test_every_finding_has_a_text_that_names_the_node(problem: MemoryProblem, origin: MemoryOrigin | None):
    finding = MemoryFinding(rank=3, node=7, problem=problem, steps=(5,), origin=origin)
    assert "of rank 3, node 7" in describe((finding,), RestoreSource.STORAGE)


def test_a_rank_of_which_no_node_has_anything_is_said_to_have_no_copy():
    assert describe((MISSING,), RestoreSource.STORAGE).endswith(", and no other node has one")
    assert "no other node" not in describe((MISSING, DAMAGED), RestoreSource.STORAGE)
    unknown = MISSING.model_copy(update={"node": None, "origin": None})
    assert describe((unknown,), RestoreSource.STORAGE).endswith("of rank 0, a node has none, and no other node has one")
