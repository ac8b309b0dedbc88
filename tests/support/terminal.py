"""A terminal for programs under test: a pseudo-terminal, and what it shows."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rich.text import Text

_CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\]8;[^\x1b\x07]*(?:\x1b\\|\x07)|\r|\n")


@dataclass
class Screen:
    """The lines of a terminal, by the few controls that rich writes: it erases lines and moves up by whole ones."""

    lines: list[str] = field(default_factory=lambda: [""])
    """With their colors, as ANSI."""
    _row: int = 0
    _rest: str = ""

    def feed(self, output: str) -> None:
        """Takes in output, of which the last control may be incomplete."""
        text, self._rest = self._rest + output, ""
        cut = text.rfind("\x1b")
        if cut >= 0 and not _CONTROL.match(text, cut):
            text, self._rest = text[:cut], text[cut:]
        position = 0
        for match in _CONTROL.finditer(text):
            self.lines[self._row] += text[position : match.start()]
            self._control(match)
            position = match.end()
        self.lines[self._row] += text[position:]

    def _control(self, match: re.Match[str]) -> None:
        match match[2] or match[0]:
            case "\n":
                self._row += 1
                if self._row == len(self.lines):
                    self.lines.append("")
            case "A":
                self._row = max(self._row - int(match[1] or 1), 0)
            case "K":
                self.lines[self._row] = ""
            case "m":
                self.lines[self._row] += match[0]
            case _:
                pass

    @property
    def text(self) -> str:
        """What a reader sees."""
        return "\n".join(Text.from_ansi(line).plain for line in self.lines)


@dataclass
class Terminal:
    """A program that runs in a terminal."""

    process: asyncio.subprocess.Process
    screen: Screen
    master: int
    raw: str = ""

    def press(self, keys: str) -> None:
        """Types keys."""
        os.write(self.master, keys.encode())

    def shows(self, text: str) -> bool:
        """Whether a text is on the screen."""
        return text in self.screen.text


@asynccontextmanager
async def in_terminal(
    command: Sequence[str], *, columns: int = 80, rows: int = 40, environment: Mapping[str, str]
) -> AsyncIterator[Terminal]:
    """Runs a program in a terminal of this size; ends it at the end."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    unset = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    variables = {name: value for name, value in os.environ.items() if name not in unset}
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**variables, "TERM": "xterm-256color", **environment},
        start_new_session=True,
    )
    os.close(slave)
    terminal = Terminal(process, Screen(), master)
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            output = os.read(master, 65_536).decode(errors="replace").replace("\r\n", "\n")
        except OSError:
            output = ""
        if not output:
            loop.remove_reader(master)
            return
        terminal.raw += output
        terminal.screen.feed(output)

    loop.add_reader(master, read)
    try:
        yield terminal
    finally:
        loop.remove_reader(master)
        if process.returncode is None:
            process.terminate()
            await process.wait()
        os.close(master)
