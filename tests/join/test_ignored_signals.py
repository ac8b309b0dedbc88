"""Tests that `perdure join` leaves signals alone that were ignored when it was started, as `nohup` does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from perdure.join import machine
from tests.support.waiting import DEADLINE


@pytest.fixture
def hangups_ignored() -> Iterator[None]:
    with hangups(signal.SIG_IGN):
        yield


@pytest.fixture
def hangups_end() -> Iterator[None]:
    """Whoever runs the tests may have started them under `nohup` themselves."""
    with hangups(signal.SIG_DFL):
        yield


@contextlib.contextmanager
def hangups(disposition: signal.Handlers) -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, disposition)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def received(*sent: signal.Signals) -> list[signal.Signals]:
    """Returns the signals that reach the command; the last one has to."""
    taken: list[signal.Signals] = []

    async def run() -> None:
        last = asyncio.Event()

        def take(number: signal.Signals) -> None:
            taken.append(number)
            if number is sent[-1]:
                last.set()

        with machine._signals(take, pass_on=take):
            for number in sent:
                os.kill(os.getpid(), number)
            await asyncio.wait_for(last.wait(), DEADLINE)

    asyncio.run(run())
    return taken


@pytest.mark.usefixtures("hangups_ignored")
def test_what_was_ignored_stays_ignored():
    assert received(signal.SIGHUP, signal.SIGTERM) == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.usefixtures("hangups_end")
def test_a_terminal_that_closes_ends_the_command_otherwise():
    assert received(signal.SIGHUP) == [signal.SIGHUP]
