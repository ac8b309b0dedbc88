"""Tests of the lines that the culprit's node alone has printed."""

from __future__ import annotations

from perdure.cli.explain import explanation
from perdure.contract import PrintedLines, RareLine
from perdure.contract.transitions import NodeCommanded
from tests.policy.scenario import Scenario

COMMON = 1
"""The key of a line that every node prints."""


def printed(*rare: str, keys: tuple[int, ...] = (), generation: int = 1) -> PrintedLines:
    """The newest line first."""
    lines = tuple(RareLine(text=text, key=hash_of(text)) for text in rare)
    return PrintedLines(generation=generation, keys=(*(line.key for line in lines), COMMON, *keys), rare=lines)


def hash_of(text: str) -> int:
    return sum(text.encode())


def own_lines(job: Scenario) -> tuple[str, ...]:
    return job.incident.own_lines


def test_lines_that_no_other_node_has_are_shown_whoever_reports_first():
    cause, victim = printed("link is down", "saving"), printed("saving")
    job = Scenario("2").running().rank_raised(1, printed=cause)
    assert own_lines(job) == (), "nothing to compare with"
    job.peer_failed(0, printed=victim, generation=1)
    assert own_lines(job) == ("link is down",)
    job = Scenario("2").running().peer_failed(0, printed=victim).rank_raised(1, printed=cause)
    assert own_lines(job) == ("link is down",)


def test_each_further_node_takes_away_what_it_has_printed_too():
    job = Scenario("3").running().rank_raised(1, printed=printed("a", "b", "c", "d", "e"))
    job.peer_failed(0, printed=printed("x"), generation=1)
    assert own_lines(job) == ("a", "b", "c")
    job.peer_failed(2, printed=printed("b", keys=(hash_of("c"),)), generation=1)
    assert own_lines(job) == ("a", "d", "e")


def test_victims_without_a_culprit_show_nothing():
    job = Scenario("2").running()
    job.peer_failed(0, printed=printed("a")).peer_failed(1, printed=printed("b")).wait(60)
    assert own_lines(job) == ()


def test_the_lines_of_a_culprit_are_gone_with_its_guilt():
    job = Scenario("3").running().rank_raised(1, printed=printed("a")).peer_failed(0, printed=printed(), generation=1)
    assert own_lines(job) == ("a",)
    job = Scenario("3").running().rank_raised(1, None, printed=printed("a")).peer_failed(0, printed=printed())
    job.rank_killed(2)
    assert (job.incident.culprit, own_lines(job)) == (2, ())


def test_of_many_nodes_a_few_are_kept_and_the_culprit_is_among_them():
    for place in (0, 8, 39):
        job = Scenario("40").running()
        for rank in range(40):
            if rank == place:
                job.rank_raised(rank, printed=printed("link is down"), generation=1)
            else:
                job.peer_failed(rank, printed=printed("saving"), generation=1)
        assert own_lines(job) == ("link is down",), place
        assert len(job.state.lines) <= 8


def test_they_are_forgotten_once_the_next_world_runs_and_never_mixed_with_those_of_another_one():
    job = Scenario("2").running().rank_raised(1, printed=printed("a"))
    assert job.state.lines
    job.steps()
    assert not job.state.lines
    job.rank_raised(1, printed=printed("b", generation=2))
    job.peer_failed(0, printed=printed("late"), generation=1)
    assert own_lines(job) == ()


def test_explain_shows_them():
    job = Scenario("2").running().rank_raised(1, printed=printed("second", "first"))
    job.peer_failed(0, printed=printed(), generation=1)
    told = explanation(job.incident, job="job", flag="").plain
    assert "ONLY  node 1 printed: first\n      node 1 printed: second\n" in told


def test_nodes_that_did_not_fail_are_compared_when_they_take_the_next_world():
    job = Scenario("2").running().rank_raised(1, printed=printed("link is down", "saving"))
    told = PrintedLines(generation=1, keys=(hash_of("saving"),))
    job.transition(0, NodeCommanded, generation=job.generation, printed=told)
    assert own_lines(job) == ("link is down",)
