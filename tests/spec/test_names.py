"""Tests of names derived from a job's name: valid for Kubernetes, and unique for each node of each run."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from perdure.contract import NodeId
from perdure.contract.names import node_name, run_name

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")

job_names = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)
role_names = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,18}[a-z0-9])?", fullmatch=True)
uids = st.from_regex(r"[0-9a-f]{8}", fullmatch=True)


@given(job_names, role_names, st.integers(0, 9999), uids, st.integers(1, 9999))
def test_a_nodes_name_is_a_label_that_keeps_what_tells_it_apart(
    job: str, role: str, rank: int, uid: str, incarnation: int
) -> None:
    name = node_name(job, NodeId(uid=uid, role=role, rank=rank, incarnation=incarnation))
    assert LABEL.fullmatch(name)
    assert name.endswith(f"-{role}-{rank}-{uid}{incarnation}")
    assert name.startswith(job[:10].rstrip("-"))


@given(job_names, uids, uids)
def test_the_objects_of_a_run_are_labels_that_tell_runs_apart(job: str, uid: str, other: str) -> None:
    assert LABEL.fullmatch(run_name(job, uid))
    assert (run_name(job, uid) == run_name(job, other)) == (uid == other)


def test_a_name_of_usual_length_is_kept_whole() -> None:
    assert run_name("j" * 40, "0123abcd") == f"perdure-{'j' * 40}-0123abcd"
