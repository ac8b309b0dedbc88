"""Tests of where the nodes of other roles are reached."""

from __future__ import annotations

from perdure.contract.transitions import NodeJoined, NodeReady
from perdure.workflows.policy.roles.addresses import addresses_by_role
from tests.policy.job_of_roles import Roles


def test_the_nodes_of_a_cluster_keep_their_names_when_their_pods_are_replaced():
    job = Roles(trainer={}, ps={"ready": {"port": 6000}})
    on_pods = job.job.model_copy(update={"backend": "kubernetes", "namespace": "nlp"})
    names = [f"ps-{rank}.perdure-job-0123abcd.nlp.svc:6000" for rank in (0, 1)]
    assert list(addresses_by_role(job.state, on_pods)["ps"].serves) == names, "known before the nodes are there"
    job.runs("ps", "trainer")
    known = addresses_by_role(job.state, on_pods)
    assert list(known["ps"].addresses) == names
    assert known["trainer"].addresses[1] == "trainer-1.perdure-job-0123abcd.nlp.svc"
    job.lost("ps", 1).ready("ps", 1).steps("ps")
    again = addresses_by_role(job.state, on_pods)["ps"]
    assert (list(again.addresses), again.generation, again.ready) == (names, known["ps"].generation + 1, True)
    assert list(addresses_by_role(job.state, job.job)["ps"].addresses) != names


def test_addresses_of_ipv6_have_brackets():
    job = Roles(trainer={}, ps={"ready": {"port": 6000}}).ready("trainer").ready("ps", 1)
    job.transition("ps", 0, NodeJoined, address="fd00::2")
    job.transition("ps", 0, NodeReady, generation=0, processes=1, store_ports=(7000,))
    elsewhere = job.job.model_copy(update={"backend": "joined"})
    assert addresses_by_role(job.state, elsewhere)["ps"].addresses == ("[fd00::2]:6000", "10.0.0.1:6000")
