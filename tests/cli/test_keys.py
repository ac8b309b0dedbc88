"""Tests of keys while a live view is shown, in a real terminal: the view is one of rich's, as that of jobs is."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios

import pytest

from tests.support.terminal import Terminal, in_terminal
from tests.support.waiting import eventually

VIEW = """
import asyncio, sys
from rich.live import Live
from perdure.cli.common import out
from perdure.cli.keys import event_of_interrupt, single_keys

pressed = []

async def main():
    async with event_of_interrupt() as leaving:
        def on_key(key):
            pressed.append(key)
            live.update(f"pressed {pressed}", refresh=True)
            if key in ("q", ""):
                leaving.set()
        with Live("waits", console=out, auto_refresh=False) as live:
            live.refresh()
            async with single_keys(on_key, out):
                live.update("reads keys", refresh=True)
                await leaving.wait()
    print("detached", flush=True)

asyncio.run(main())
"""


def is_cooked(terminal: Terminal) -> bool:
    """Whether the terminal is as a shell has it: it edits lines, and echoes."""
    modes = termios.tcgetattr(terminal.master)[3]
    return bool(modes & termios.ICANON and modes & termios.ECHO)


def shows_cursor(terminal: Terminal) -> bool:
    return terminal.raw.rfind("\x1b[?25h") > terminal.raw.rfind("\x1b[?25l")


def state_of(process: int) -> str:
    with open(f"/proc/{process}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


async def test_ctrl_z_gives_the_terminal_back_and_fg_takes_it_again() -> None:
    async with in_terminal([sys.executable, "-c", VIEW], environment={}) as terminal:
        await eventually(lambda: terminal.shows("reads keys"), within=60)
        assert not is_cooked(terminal)
        for keys in ("a", "b"):
            # What Ctrl-Z has the terminal do, which controls no processes here.
            terminal.process.send_signal(signal.SIGTSTP)
            await eventually(lambda: state_of(terminal.process.pid) == "T", within=20)
            assert is_cooked(terminal)
            await eventually(lambda: shows_cursor(terminal), within=20)
            os.kill(terminal.process.pid, signal.SIGCONT)
            await eventually(lambda: not is_cooked(terminal) and not shows_cursor(terminal), within=20)
            terminal.press(keys)
            await eventually(lambda keys=keys: terminal.shows(f"'{keys}'"), within=20)
        terminal.press("q")
        assert await asyncio.wait_for(terminal.process.wait(), 20) == 0
        assert is_cooked(terminal)
        assert shows_cursor(terminal)


@pytest.mark.parametrize("times", [1, 3])
async def test_ctrl_c_detaches_however_often_it_is_pressed(times: int) -> None:
    async with in_terminal([sys.executable, "-c", VIEW], environment={}) as terminal:
        await eventually(lambda: terminal.shows("reads keys"), within=60)
        for _ in range(times):
            terminal.process.send_signal(signal.SIGINT)
        await asyncio.wait_for(terminal.process.wait(), 20)
        await eventually(lambda: terminal.shows("detached") or terminal.process.returncode != 0, within=20)
        assert is_cooked(terminal)
        assert shows_cursor(terminal)
        assert terminal.process.returncode in ((0,) if times == 1 else (0, 1, 130, -signal.SIGINT))
