"""Tests of how the launcher parses answers from another release, or malformed ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from perdure_training.node_api.bodies import CommandExit, Desired, RankExit, ReadyReport, World, WorldAnswer
from perdure_training.node_api.codec import Malformed, decode, encode, encode_essentials

WORLD: dict[str, Any] = {
    "generation": 2,
    "nodes": 1,
    "group_rank": 0,
    "base_rank": 0,
    "world_size": 1,
    "store_address": "10.0.0.1",
    "store_port": 29500,
    "store_host": True,
}
DESIRED: dict[str, Any] = {"version": 4, "run": True, "attempt": 1}


def test_unknown_fields_are_ignored_and_missing_ones_have_their_default() -> None:
    desired = decode(Desired, {**DESIRED, "colour": "red", "world": {**WORLD, "complete": 1}})
    assert desired == Desired(version=4, run=True, attempt=1, world=World(**WORLD))


def test_a_malformed_field_has_its_default() -> None:
    odd = {"stop_generation": "x", "exit": "yes", "exit_grace_s": float("nan"), "reason": 3, "world": {"generation": 1}}
    assert decode(Desired, {**DESIRED, **odd}) == Desired(version=4, run=True, attempt=1)
    ranks = [{"local_rank": 1, "signal": True, "time": 10**400}, {"signal": 9}, 5]
    assert decode(ReadyReport, {"ranks": ranks, "store_ports": {}}) == ReadyReport(ranks=(RankExit(local_rank=1),))


def test_whole_numbers_are_times_too() -> None:
    assert decode(RankExit, {"local_rank": 0, "time": 17}) == RankExit(local_rank=0, time=17.0)


@pytest.mark.parametrize("content", [[], None, 7, {}, {**DESIRED, "run": "no"}, {**DESIRED, "version": None}])
def test_a_body_without_what_it_is_about_is_refused_with_what_is_wrong(content: Any) -> None:
    with pytest.raises(Malformed, match="Desired"):
        decode(Desired, content)


def test_a_world_rides_in_its_answer() -> None:
    world = World(**WORLD, stage=1)
    answer = WorldAnswer(world=world, complete=1, stages_complete=1)
    assert decode(WorldAnswer, json.loads(encode(answer))) == answer
    assert decode(WorldAnswer, {"complete": 3}) == WorldAnswer(complete=3)


def test_the_essentials_of_a_report_are_its_numbers_and_flags() -> None:
    report = CommandExit(
        attempt=2, signal=9, log_tail="x", message="y", ranks=(RankExit(local_rank=1, error="z", time=float("inf")),)
    )
    fields = json.loads(encode_essentials(report))
    assert not {"log_tail", "message"} & fields.keys()
    assert "error" not in fields["ranks"][0]
    assert decode(CommandExit, fields) == CommandExit(attempt=2, signal=9, ranks=(RankExit(local_rank=1),))
