"""The faults, each with its program and what must come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.faults import Kind
from benchmarks.chaos.programs import BIN, PROGRAMS, Program

from .injections import (
    Both,
    Freeze,
    FullDisk,
    HangingStorage,
    Injection,
    InRank,
    Kill,
    Partition,
    SkewedClock,
    SlowLink,
)
from .judgement import AGENTS, LINKS, Expected

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
    processes: int = 1
    """Ranks of each node."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Further variables of the program."""
    throughput: bool = False
    """Its steps a second are measured before the fault, during it and after the repair."""


_REPORTS = Path(__file__).parents[2] / "tests" / "system" / "bad_losses.py"
REPORTING = Program(
    "reporting",
    lambda out, length: [str(BIN / "torchrun"), str(_REPORTS), str(out), "--steps", str(length)],
    length=60,
    result=str,
)
"""A program that reports its losses and has checkpoints in memory."""
_REPLAYS = Path(__file__).with_name("programs") / "replayed.py"
REPLAYED = Program(
    "replayed", lambda _, length: [str(BIN / "torchrun"), str(_REPLAYS), str(length)], length=60, result=str
)
"""A program whose ranks compare what they compute."""
RESTART = ("RESTART_RANKS",)
PACE = 0.05
"""Seconds of a step of the programs, which sleep instead of computing."""
SILENT = 17.0
"""Seconds until a node that neither answers nor ends is shown as unreachable: its lease lapses after 6 s, the server
hands the next one to a poll that is still open, whose 6 s pass, too, and a third one is not taken within 4 s."""
STRAGGLER = "slow-rank-of-eight"
"""The row whose time is that of naming a slow rank: it makes a step in 1/0.8 of the time of the others."""
LONG_STEP = 0.2
"""Seconds of a step of eight ranks, beside which what they compute is small even where they share two processors."""
REPLACED = "slow-rank-replaced"
"""The row whose throughput after the repair is compared with that before the fault."""


def one_culprit(failure: str, *actions: str, culprit: int = 1, within: float = 1.0, hang: str = "") -> Expected:
    """Returns that one node is the culprit, by default the second."""
    return Expected(failure, frozenset({culprit}), frozenset(actions or RESTART), within, hang=hang)


def _hang(kind: str) -> Expected:
    return one_culprit("RANK_HANG", "END_HANG", within=15.0, hang=kind)


def _stop(failure: str, *, after: int) -> Expected:
    return Expected(failure, frozenset({1}), frozenset({"STOP"}), interruptions=after, stops=True)


def _shown(field: str, within: float = 10.0) -> Expected:
    return Expected("", frozenset({1}), within=within, shown=field)


ROWS = (
    Row("kill-rank", DDP, Kill(Kind.RANK), one_culprit("KILLED")),
    Row("kill-rank-of-trainer", TRAINER, Kill(Kind.RANK, (0,)), one_culprit("KILLED", culprit=0)),
    Row("kill-two-ranks", DDP, Kill(Kind.RANK, (0, 2)), Expected("KILLED", frozenset({0, 2}), frozenset(RESTART)), 3),
    Row("kill-torchrun", DDP, Kill(Kind.TORCHRUN), one_culprit("COMMAND_LOST", "START_COMMAND", "RESTART_RANKS")),
    Row("kill-node", DDP, Kill(Kind.NODE), one_culprit("NODE_LOST", "REPLACE_NODES", "AWAIT_NODES", within=10.0)),
    Row("kill-agent", DDP, Kill(Kind.AGENT), _shown(AGENTS)),
    Row("freeze-agent", DDP, Freeze(Kind.FROZEN_AGENT), _shown("unreachable", within=SILENT)),
    Row("exit-1", LIGHTNING, InRank("exit_with_1", ends=True), one_culprit("USER_CODE")),
    Row("exit-1-always", DDP, InRank("exit_with_1", each_time=True, ends=True), _stop("USER_CODE", after=5)),
    Row("raise-always", TRAINER, InRank("raise_an_error", each_time=True, ends=True), _stop("USER_CODE", after=2)),
    Row("segfault", DDP, InRank("segfault", ends=True), one_culprit("CRASH")),
    Row("memory-limit", LIGHTNING, InRank("exceed_memory", ends=True), one_culprit("OUT_OF_MEMORY")),
    # Of two ranks, each has another size than the other.
    Row("another-size", DDP, InRank("bring_another_size"), Expected("USER_CODE", frozenset(), frozenset(RESTART))),
    Row("stopped-rank", DDP, Freeze(Kind.RANK), _hang("STOPPED"), 3),
    Row("deadlock", TRAINER, InRank("wait_for_a_lock"), _hang("ASLEEP"), 3),
    Row("infinite-loop", DDP, InRank("loop"), _hang("LOOP"), 3),
    Row("blocked-interpreter", DDP, InRank("block_the_interpreter"), _hang("ASLEEP"), 3),
    Row("thread-keeps-interpreter", DDP, InRank("block_the_interpreter_in_a_thread"), _hang("INTERPRETER"), 3),
    Row("deadlocked-loader", LIGHTNING, InRank("load_from_a_stuck_worker"), _hang("DATA_LOADER"), 3),
    Row("mismatched-collective", DDP, InRank("enter_one_more_collective"), _hang("MISMATCH"), 3),
    Row("skipped-collective", DDP, InRank("enter_one_more_collective", others=True), _hang("MISMATCH"), 3),
    Row("full-disk", DDP, FullDisk(), one_culprit("STORAGE", culprit=0, within=5.0)),
    Row(
        "hanging-storage",
        DDP,
        HangingStorage(),
        one_culprit("RANK_HANG", "REPLACE_NODES", "RESTART_RANKS", culprit=0, within=15.0, hang="KERNEL"),
        3,
    ),
    Row(
        "nan-loss",
        REPORTING,
        InRank("spoil"),
        one_culprit("NUMERIC", "ROLL_BACK", "RESTART_RANKS", within=5.0),
        spec={"recovery": {"on_nan": "rollback"}},
    ),
    Row(
        "bit-flip",
        REPLAYED,
        InRank("flip", arguments={"bit": 30}),
        one_culprit("CORRUPTION", "REPLACE_NODES", "RESTART_RANKS", "ROLL_BACK", within=10.0),
        3,
    ),
    Row("slow-rank", DDP, InRank("slow", arguments={"seconds": 0.25 * PACE}), _shown("stragglers", within=30.0), 4),
    Row(
        STRAGGLER,
        DDP,
        InRank("slow", rank=5, arguments={"seconds": 0.25 * LONG_STEP}),
        _shown("stragglers", within=30.0),
        processes=4,
        environment={"STEP_SECONDS": f"{LONG_STEP}"},
    ),
    Row("half-speed", DDP, InRank("slow", arguments={"seconds": PACE}), _shown("stragglers", within=30.0), 4),
    Row(
        REPLACED,
        DDP,
        InRank("slow", arguments={"seconds": PACE}),
        one_culprit("STRAGGLER", "REPLACE_NODES", "RESTART_RANKS", within=45.0),
        4,
        spec={"recovery": {"on_straggler": "replace"}},
        throughput=True,
    ),
    Row(
        "kill-beside-stopped-rank",
        DDP,
        Both(Freeze(Kind.RANK), Kill(Kind.RANK, (2,))),
        one_culprit("KILLED", culprit=2),
        3,
    ),
    Row(
        "kill-rank-and-node",
        DDP,
        Both(Kill(Kind.RANK), Kill(Kind.NODE, (2,))),
        Expected(
            "NODE_LOST",
            frozenset({1, 2}),
            frozenset({"REPLACE_NODES", "AWAIT_NODES"}),
            within=10.0,
            before="KILLED",
        ),
        3,
    ),
    Row("slow-link", DDP, SlowLink(), _shown(LINKS, within=30.0), 3),
    Row("partition", DDP, Partition(), _shown("unreachable", within=SILENT), 3),
    Row("clock-skew", DDP, SkewedClock(Kill(Kind.RANK)), one_culprit("KILLED"), 3),
)

PROFILES = (
    "steady",
    "warm-up",
    "evaluation-on-all",
    "evaluation-on-one",
    "silent-work-on-one",
    "bursty-input",
    "compilation",
    "long-saves",
    "gradual-slow-down",
    "long-sequences",
    "end-of-epoch",
)
"""The ways in which a training without a fault makes its steps, which `programs/injected.py` knows."""
