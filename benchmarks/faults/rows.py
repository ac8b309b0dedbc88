"""The faults, each with its program and what must come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos.faults import Kind
from benchmarks.chaos.programs import PROGRAMS, Program

from .injections import Freeze, Injection, InRank, Kill
from .judgement import AGENTS, Expected

_KNOWN = {program.name: program for program in PROGRAMS}
DDP, LIGHTNING, TRAINER = _KNOWN["ddp"], _KNOWN["lightning"], _KNOWN["trainer"]


@dataclass(frozen=True)
class Row:
    """One fault of the matrix."""

    name: str
    program: Program
    injection: Injection
    expected: Expected
    nodes: int = 2
    spec: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of the job."""


RESTART = ("RESTART_RANKS",)


def _one(failure: str, *actions: str, culprit: int = 1, within: float = 1.0) -> Expected:
    return Expected(failure, frozenset({culprit}), frozenset(actions or RESTART), within)


def _stop(failure: str, *, after: int) -> Expected:
    return Expected(failure, frozenset({1}), frozenset({"STOP"}), interruptions=after, stops=True)


def _shown(field: str, within: float = 10.0) -> Expected:
    return Expected("", frozenset({1}), within=within, shown=field)


ROWS = (
    Row("kill-rank", DDP, Kill(Kind.RANK), _one("KILLED")),
    Row("kill-rank-of-trainer", TRAINER, Kill(Kind.RANK, (0,)), _one("KILLED", culprit=0)),
    Row("kill-two-ranks", DDP, Kill(Kind.RANK, (0, 2)), Expected("KILLED", frozenset({0, 2}), frozenset(RESTART)), 3),
    Row("kill-torchrun", DDP, Kill(Kind.TORCHRUN), _one("COMMAND_LOST", "START_COMMAND", "RESTART_RANKS")),
    Row("kill-node", DDP, Kill(Kind.NODE), _one("NODE_LOST", "REPLACE_NODES", "AWAIT_NODES", within=10.0)),
    Row("kill-agent", DDP, Kill(Kind.AGENT), _shown(AGENTS)),
    Row("freeze-agent", DDP, Freeze(Kind.FROZEN_AGENT), _shown("unreachable", within=12.0)),
    Row("exit-1", LIGHTNING, InRank("exit_with_1", ends=True), _one("USER_CODE")),
    Row("exit-1-always", DDP, InRank("exit_with_1", each_time=True, ends=True), _stop("USER_CODE", after=4)),
    Row("raise-always", TRAINER, InRank("raise_an_error", each_time=True, ends=True), _stop("USER_CODE", after=2)),
    Row("segfault", DDP, InRank("segfault", ends=True), _one("CRASH")),
    Row("memory-limit", LIGHTNING, InRank("exceed_memory", ends=True), _one("OUT_OF_MEMORY")),
    Row("another-size", DDP, InRank("bring_another_size"), _one("USER_CODE")),
)
