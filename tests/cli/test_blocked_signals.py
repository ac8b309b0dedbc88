"""Commands that are started by a program which has blocked signals."""

from __future__ import annotations

import signal

from perdure.cli.main import run_command


def test_a_command_receives_signals_that_its_parent_has_blocked() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        assert run_command(["--version"]) == 0
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
