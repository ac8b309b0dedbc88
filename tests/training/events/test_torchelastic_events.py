"""Tests of torchelastic's events API: the examples of its documentation, and how its events reach the bus."""

from __future__ import annotations

from typing import Any

import pytest

from perdure_training.events import AsyncExporter, EventEmitter
from perdure_training.torchelastic import events
from perdure_training.torchelastic.events import api
from tests.training.events.collected import Collected, run


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api._handlers, "by_type", {})
    monkeypatch.setattr(api._handlers, "default", api.NullEventHandler())


DOCUMENTED = """
from perdure_training.torchelastic import events as event
from perdure_training.torchelastic.events import Event, EventHandler, record, record_event

event.configure(event.NullEventHandler()) # uses event_type = "torchelastic"
event.configure(event.ConsoleEventHandler(), event_type = "foo")

def execute():
  event = Event(name="test_event", event_type="foo")
  # The code below will be processed by the ConsoleEventHandler
  record_event(event)

execute()

def execute():
  metadata = {'key':'value'}
  record(event_name="test", event_type="console", metadata=metadata)

execute()

class StdoutEventHandler(EventHandler):
   def record(self, event):
       print(f"[{event.event_type}]: event_name: {event.name}")

event.configure(StdoutEventHandler(), event_type="stdout_events")
record(event_name="test", event_type="stdout_events")
"""
"""The examples of torchelastic 0.2.0's documentation with another import, and calls of what they define."""


def test_the_documented_examples_run():
    console, custom = run(DOCUMENTED).splitlines()
    assert console.endswith("] foo:test_event")
    assert custom == "[stdout_events]: event_name: test"


def test_both_documented_modules_have_the_same_names():
    assert set(events.__all__) == set(api.__all__)
    assert all(getattr(events, name) is getattr(api, name) for name in api.__all__)


class Kept(api.EventHandler):
    def __init__(self) -> None:
        self.events: list[api.Event] = []

    def record(self, event: api.Event) -> None:
        self.events.append(event)


def test_handlers_receive_the_events_as_they_were_recorded():
    """What torchelastic's own tests of this API check."""
    by_default, by_type = Kept(), Kept()
    api.configure(by_default)
    api.configure(by_type, "mine")
    without_type = api.Event("first", metadata={})
    api.record_event(without_type)
    metadata = {"number": 10, "text": "value"}
    with_type = api.Event("second", "mine", metadata)
    api.record_event(with_type)
    api.record("third", "mine", metadata)
    api.record("fourth", "mine")
    assert by_default.events == [without_type]
    assert by_type.events[0] is with_type
    assert [(event.name, event.type, event.metadata) for event in by_type.events] == [
        ("second", "mine", metadata),
        ("third", "mine", metadata),
        ("fourth", "mine", {}),
    ]


def test_an_event_shows_its_fields():
    event = api.Event("epoch_done", "training", {"epoch": 3}, timestamp=5)
    assert repr(event) == "Event(name='epoch_done', type='training', metadata={'epoch': 3}, timestamp=5)"


@pytest.mark.parametrize("wrong", ["x", None, api.ConsoleEventHandler])
def test_what_cannot_record_an_event_is_refused_when_it_is_configured(wrong: Any):
    with pytest.raises(TypeError, match=r"handler: expected .* found "):
        api.configure(wrong)


def test_events_of_a_type_reach_its_handler_or_the_default(capsys: pytest.CaptureFixture[str]):
    api.configure(api.ConsoleEventHandler())
    api.configure(api.NullEventHandler(), "quiet")
    api.record_event(api.Event("seen", timestamp=5))
    api.record("unseen", "quiet")
    assert capsys.readouterr().out == "[5] torchelastic:seen\n"


def test_events_reach_the_bus_with_their_time():
    collected = Collected()
    exporter = AsyncExporter(collected)
    api.configure(api.BusEventHandler(EventEmitter("unused", exporter)))
    api.record_event(api.Event("old", "mine", {"key": "value"}, timestamp=12_500))
    api.record("new", metadata={"rank": 4})
    exporter.close()
    old, new = collected.events
    assert (old.target, old.name, old.attributes, old.time) == ("mine", "old", {"key": "value"}, 12.5)
    assert (new.target, new.attributes) == ("torchelastic", {"rank": 4})
    assert new.time > 1e9


def test_a_handler_that_raises_does_not_reach_the_program(caplog: pytest.LogCaptureFixture):
    class Raises(api.EventHandler):
        def record(self, event: api.Event) -> None:
            raise OSError("full")

    api.configure(Raises())
    api.record("x")
    assert [record.message for record in caplog.records] == ["the event x is not recorded: OSError: full"]
