"""Tests of events and spans, and of what they may hold."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import perdure.events
from perdure_training import events as library
from perdure_training.events import AsyncExporter, Event, EventEmitter, EventType, Redaction, TrainerEvents
from perdure_training.events.formats import LONGEST_LINE, json_line, text_line
from perdure_training.events.plain import LONGEST_TEXT, MOST_ITEMS
from tests.training.events.collected import Collected, lines, run


class Bus:
    """An emitter, and what it has exported."""

    def __init__(self) -> None:
        self._collected = Collected()
        self.exporter = AsyncExporter(self._collected, redaction=Redaction({"HF_TOKEN": "swordfish-12"}))
        self.emitter = EventEmitter("test", self.exporter, rank=3, generation=7)

    @property
    def events(self) -> list[Event]:
        assert self.exporter.flush()
        return self._collected.events

    def attributes(self, **attributes: Any) -> Any:
        """What becomes of attributes on their way through JSON."""
        self.emitter.instant("x", **attributes)
        return json.loads(json_line(self.events[-1]))["attributes"]


@pytest.fixture
def bus() -> Iterator[Bus]:
    made = Bus()
    yield made
    made.exporter.close()


def test_an_event_says_what_happened_when_and_where(bus: Bus):
    before = time.time()
    bus.emitter.instant("seen", step=5)
    [event] = bus.events
    assert (event.target, event.name, event.type, event.attributes) == ("test", "seen", EventType.INSTANT, {"step": 5})
    assert (event.rank, event.generation) == (3, 7)
    assert before <= event.time <= time.time()


def test_an_event_may_be_about_another_time_and_rank(bus: Bus):
    bus.emitter.instant("exit", time=12.5, rank=9, generation=2)
    [event] = bus.events
    assert (event.time, event.rank, event.generation) == (12.5, 9, 2)


def test_a_span_succeeds_with_its_block_and_fails_with_an_exception_that_passes(bus: Bus):
    with bus.emitter.span("good", step=1) as span:
        span.add(size=2)

    def fail() -> None:
        with bus.emitter.span("bad"):
            raise KeyError("k")

    with pytest.raises(KeyError):
        fail()
    good_begin, good_end, bad_begin, bad_end = bus.events
    assert good_begin.id == good_end.id != bad_begin.id == bad_end.id
    assert good_begin.attributes == {"step": 1}
    assert {**good_end.attributes, "duration_s": 0} == {"step": 1, "size": 2, "duration_s": 0, "success": True}
    assert (bad_end.type, bad_end.attributes["success"]) == (EventType.END, False)
    assert bad_end.attributes["error"] == "KeyError: 'k'"


def test_a_stage_names_its_span_and_a_span_ends_once(bus: Bus):
    span = bus.emitter.span("save", step=1).begin()
    span.begin()
    span.stage("write", path="/x").begin().succeed()
    span.fail("full")
    span.succeed()
    events = bus.events
    assert [(event.name, event.type.value) for event in events] == [
        ("save", "begin"),
        ("save.write", "begin"),
        ("save.write", "end"),
        ("save", "end"),
    ]
    assert events[1].attributes == {"step": 1, "path": "/x", "within": span.id}
    assert events[3].attributes["error"] == "full"


def test_a_clock_that_is_set_back_changes_neither_the_order_nor_a_duration(bus: Bus, monkeypatch: pytest.MonkeyPatch):
    times = iter((1000.0, 400.0, 300.0))
    monkeypatch.setattr("perdure_training.events.emitter.clock.time", lambda: next(times))
    with bus.emitter.span("first"):
        bus.emitter.instant("second")
    monkeypatch.undo()
    begin, second, end = bus.events
    assert (begin.time, second.time, end.time) == (1000.0, 400.0, 300.0)
    assert 0 <= end.attributes["duration_s"] < 100
    first, next_one = (int(event.id.rpartition("-")[2], 16) for event in (begin, second))
    assert next_one == first + 1


class Color(Enum):
    RED = "red"


class Hostile:
    """An object whose code must not run."""

    device = SimpleNamespace(type="cuda")
    shape = ()

    def __repr__(self) -> str:
        raise AssertionError("it makes the program wait for a device")

    item = __float__ = __str__ = __repr__


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_values_that_json_does_not_have_are_converted(bus: Bus):
    found = bus.attributes(
        color=Color.RED,
        pause=timedelta(seconds=2),
        moment=datetime(2026, 1, 2, tzinfo=UTC),
        path=Path("/a/b"),
        group={3},
        nan=float("nan"),
        endless=[float("-inf")],
        error=ValueError("bad"),
        speechless=Speechless(),
        data=b"abc",
        keys={(1, 2): 3, None: 4},
        plain=object(),
        remote=Hostile(),
        scalar=SimpleNamespace(shape=(), item=lambda: 2.5),
        huge=[10**30, 2**99999],
        half="\udce9t\u00e9",
        whole=2**63 - 1,
        nested={"a": [True, None, {"b": 1.5}]},
    )
    assert found == {
        "color": "red",
        "pause": 2.0,
        "moment": "2026-01-02T00:00:00+00:00",
        "path": "/a/b",
        "group": [3],
        "nan": "nan",
        "endless": ["-inf"],
        "error": "ValueError: bad",
        "speechless": "Speechless: <its text cannot be made>",
        "data": "<3 bytes>",
        "keys": {"[1, 2]": 3, "None": 4},
        "plain": "<object>",
        "remote": "<Hostile>",
        "scalar": 2.5,
        "huge": [str(10**30), "<an integer of 100,000 bits>"],
        "half": "?té",
        "whole": 2**63 - 1,
        "nested": {"a": [True, None, {"b": 1.5}]},
    }


def test_what_an_event_was_given_may_change_afterwards(bus: Bus):
    given = {"a": [1]}
    bus.emitter.instant("x", given=given)
    given["a"].append(2)
    assert bus.events[0].attributes == {"given": {"a": [1]}}


def test_endless_values_end(bus: Bus):
    loop: list[Any] = []
    loop += [loop] * 1000
    text = "é" * 10_000_000
    found = bus.attributes(loop=loop, text=text, many=list(range(1_000_000)))
    assert len(found["text"]) == LONGEST_TEXT
    assert found["many"][-1] == f"… {1_000_000 - MOST_ITEMS:,} more"
    assert json.dumps(found["loop"]).count("more") < 1000


def test_a_line_has_a_longest_length(bus: Bus):
    assert bus.attributes(**{f"a{number}": "x" * 10_000 for number in range(10)}).keys() == {"left_out"}
    texts: dict[str, Any] = {f"a{number}": "é" * 10_000 for number in range(10)}
    bus.emitter.instant("long", **texts)
    assert len(text_line(bus.events[-1])) <= LONGEST_LINE


def test_lines_for_people_hold_no_terminal_escapes_and_no_second_line(bus: Bus):
    bus.emitter.instant("na\nme", text="a\x1b[2Jb\r\nc\u202ed\x9b", other="two words", quoted='a"b')
    line = text_line(bus.events[0]).decode()
    assert line.count("\n") == 1
    assert not set(line[:-1]) & {"\x1b", "\r", "\n", "\u202e", "\x9b"}
    moment, _, rest = line.rstrip().partition(" ")
    assert datetime.fromisoformat(moment).timestamp() == pytest.approx(bus.events[0].time, abs=0.002)
    assert rest == (
        r"test rank=3 generation=7 na\nme instant "
        r"text=a\x1b[2Jb\r\nc\u202ed\x9b "
        r'other="two words" quoted="a\"b"'
    )


@pytest.mark.parametrize(
    "text",
    [
        "401 for swordfish-12",
        "https://ana:swordfish@host/x",
        "Authorization: Bearer c3dvcmRmaXNoMTI=",
        "login failed: password=swordfish, user=ana",
        '{"api_key": "swordfish"}',
        "hf_swordfishswordfishsword",
        "-----BEGIN RSA PRIVATE KEY-----\nswordfish\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_secrets_in_texts_are_replaced(bus: Bus, text: str):
    def fail() -> None:
        with bus.emitter.span("login", seen=[{"text": text}]):
            raise ValueError(text)

    with pytest.raises(ValueError):  # noqa: PT011 - its text is a secret
        fail()
    exported = b"".join(map(json_line, bus.events)).decode()
    assert "swordfish" not in exported
    assert "c3dvcmRm" not in exported
    assert exported.count("[redacted]") == 3


def test_the_jobs_secrets_are_replaced_whatever_their_names_are():
    redaction = Redaction(
        {"PERDURE_SECRET_NAMES": "DB,GONE,PIN", "DB": "host/swordfish", "PIN": "1234", "A_KEY": "kkkkkkkk"}
    )
    assert redaction.text("at host/swordfish, 1234 kkkkkkkk") == "at [redacted], 1234 [redacted]"


def test_secrets_are_known_by_the_names_of_attributes_and_ordinary_texts_stay(bus: Bus):
    found = bus.attributes(auth_token="abc", tokens=512, text="tokens per second: 5; a key: value; loss=1.5")
    assert found == {"auth_token": "[redacted]", "tokens": 512, "text": "tokens per second: 5; a key: value; loss=1.5"}


def test_nothing_raises_into_the_program(bus: Bus, caplog: pytest.LogCaptureFixture):
    class Broken(dict[str, int]):
        def items(self) -> Any:
            raise RuntimeError("changed during iteration")

    broken = Broken(a=1)
    bus.emitter.instant("left out", broken=broken)
    with bus.emitter.span("spared", broken=broken):
        pass
    bus.emitter.instant("follows")
    assert [event.name for event in bus.events] == ["follows"]
    assert [record.message for record in caplog.records] == [
        "the event left out is left out: RuntimeError: changed during iteration"
    ]


def test_every_predefined_event_has_the_name_of_its_method():
    collected = Collected()
    trainer = TrainerEvents(AsyncExporter(collected))
    names = [name for name in vars(TrainerEvents) if not name.startswith("_")]
    for name in names:
        method = getattr(trainer, name)
        asked = (
            {"step": 1} if name in ("step", "metrics", "save", "persist") else {"epoch": 1} if name == "epoch" else {}
        )
        made = method(KeyError("x")) if name == "exception" else method(**asked, more=2)
        if made is not None:
            made.begin()
    assert trainer.flush()
    assert collected.names == names
    assert all(event.target == "trainer" for event in collected.events)


def test_the_control_plane_has_the_same_classes():
    assert perdure.events.__all__ == library.__all__
    assert all(getattr(perdure.events, name) is getattr(library, name) for name in library.__all__)


RANK: dict[str, Any] = {
    "RANK": "2",
    "LOCAL_RANK": "1",
    "PERDURE_RUN_ID": "abc",
    "TORCHELASTIC_RUN_ID": "abc",
    "PERDURE_GENERATION": "7",
}
EMITS = "from perdure_training.events import TrainerEvents; TrainerEvents().start(size=1)"


def test_a_rank_writes_to_its_own_file_and_flushes_at_its_end(tmp_path: Path):
    run(EMITS, **RANK, PERDURE_PROGRESS_DIR=str(tmp_path / "progress"))
    [event] = lines(tmp_path / "events" / "local-rank-1.jsonl")
    assert (event["target"], event["name"], event["rank"], event["generation"]) == ("trainer", "start", 2, 7)


@pytest.mark.parametrize(
    "changes",
    [{"RANK": ""}, {"TORCHELASTIC_RUN_ID": "other"}, {"PERDURE_EVENTS": "off"}, {"PERDURE_PROGRESS_DIR": ""}],
    ids=lambda changes: next(iter(changes)),
)
def test_other_processes_write_nothing(tmp_path: Path, changes: dict[str, Any]):
    run(EMITS, **dict[str, Any](RANK, PERDURE_PROGRESS_DIR=str(tmp_path / "progress")) | changes)
    assert list(tmp_path.iterdir()) == []


def test_an_emitter_of_a_warm_interpreter_finds_its_rank_after_the_fork(tmp_path: Path):
    script = f"""
import os, sys
from perdure_training.events import TrainerEvents
events = TrainerEvents()
events.start()
if os.fork() == 0:
    os.environ.update({RANK!r}, PERDURE_PROGRESS_DIR=sys.argv[1])
    events.init().begin()
    sys.exit()
os.wait()
"""
    run(script, tmp_path / "progress", RANK="")
    [event] = lines(tmp_path / "events" / "local-rank-1.jsonl")
    assert (event["name"], event["rank"]) == ("init", 2)


def test_the_library_imports_nothing_else():
    script = """
import sys
before = {name.partition(".")[0] for name in sys.modules}
import perdure_training.events, perdure_training.torchelastic.events
print(*{name.partition(".")[0] for name in sys.modules} - before - set(sys.stdlib_module_names))
"""
    assert run(script).split() == ["perdure_training"]
