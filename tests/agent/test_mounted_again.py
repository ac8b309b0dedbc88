"""A storage that hangs and is mounted again is used, although the calls to the old mount never return."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.agent.checkpoint import further_tries, listing
from perdure.agent.checkpoint.listing import Listing
from perdure.agent.checkpoint.stalled_writes import WriteTurns
from perdure.agent.checkpoint.storage import Storage
from perdure.contract import CheckpointRef
from tests.support.waiting import DEADLINE


@pytest.fixture
def old_mount(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Once it is set, calls that began before return. Calls that begin later wait for it until a test has them not."""
    returns = threading.Event()
    saved = Storage.saved

    def hang(storage: Storage, place: str) -> list[CheckpointRef]:
        returns.wait()
        return saved(storage, place)

    monkeypatch.setattr(Storage, "saved", hang)
    yield returns
    returns.set()


def listing_of(folder: Path) -> Listing:
    return Listing(Storage(str(folder)), is_sound=lambda _: True, is_trusted=lambda _: True)


def test_a_storage_that_is_mounted_again_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_mount: threading.Event
):
    monkeypatch.setattr(further_tries, "_FIRST_PAUSE", 0.0)
    monkeypatch.setattr(listing, "_WITHIN", 0.01)
    listed = listing_of(tmp_path)
    with pytest.raises(OSError, match="hangs: it has not listed"):
        listed.get("")
    monkeypatch.setattr(listing, "_WITHIN", DEADLINE)
    monkeypatch.setattr(Storage, "saved", lambda *_: [])
    assert listed.get("")["checkpoints"] == []


def test_a_storage_that_hangs_is_not_listed_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_mount: threading.Event
):
    monkeypatch.setattr(listing, "_WITHIN", 0.01)
    listed = listing_of(tmp_path)
    for _ in range(5):
        with pytest.raises(OSError, match="hangs: it has not listed"):
            listed.get("")
    assert [one.name for one in threading.enumerate()].count("listing") == 1


def test_a_part_that_is_not_taken_keeps_no_other_one_waiting():
    turns = WriteTurns()
    with turns.take() as end_first, turns.take() as end_second:
        end_first()
        end_second()
        with turns.take(), turns.take():
            pass
    with turns.take(), turns.take():
        pass
