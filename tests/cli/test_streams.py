"""Commands whose standard streams are closed, or whose reader goes away."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from perdure.base.errors import ExitCode
from perdure.cli import main
from perdure.cli.terminal import ReaderGone, SafeConsole
from tests.support.command_line import PERDURE
from tests.support.waiting import DEADLINE


@pytest.mark.parametrize(
    ("specification", "code"), [("name: a\nroles: {worker: {nodes: 1, command: [b]}}\n", 0), ("name: 1\n", 2)]
)
def test_a_command_without_streams_ends_as_with_dev_null(tmp_path: Path, specification: str, code: int) -> None:
    (tmp_path / "job.yaml").write_text(specification)
    words = shlex.join((*PERDURE, "validate", "job.yaml"))
    ran = subprocess.run(["sh", "-c", f"{words} >&- 2>&- <&-"], cwd=tmp_path, timeout=DEADLINE, check=False)
    assert ran.returncode == code


def test_a_file_that_is_opened_is_no_standard_output(tmp_path: Path) -> None:
    program = (
        "from perdure.base.standard_streams import open_closed_streams; open_closed_streams(); "
        "file = open('found', 'w'); print('printed', flush=True); print(file.fileno(), file=file)"
    )
    words = f'{shlex.quote(PERDURE[0])} -c "{program}" >&- 2>&- <&-'
    subprocess.run(["sh", "-c", words], cwd=tmp_path, timeout=DEADLINE, check=True)
    assert int((tmp_path / "found").read_text()) > 2


@pytest.mark.parametrize(
    "locale",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=["as Python is told", "as the shell is"],
)
def test_a_terminal_that_is_not_in_utf_8_gets_escapes(locale: dict[str, str]) -> None:
    program = "import perdure.cli; print('not ready \\u2026')"
    ran = subprocess.run(
        [PERDURE[0], "-c", program],
        env=os.environ | locale,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    assert ran.stdout == "not ready \\u2026\n"


@pytest.fixture
def console() -> Iterator[SafeConsole]:
    """A console whose reader has gone."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as file:
        yield SafeConsole(file=file)


def test_a_command_whose_reader_has_gone_ends(console: SafeConsole) -> None:
    with pytest.raises(ReaderGone):
        console.print("a line")


def test_a_command_that_waits_for_its_job_goes_on_without_its_reader(console: SafeConsole) -> None:
    console.continues = True
    for _ in range(3):
        console.print("a line")


def test_another_broken_pipe_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> NoReturn:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(main, "app", fails)
    assert main.run_command(["status"]) == ExitCode.USAGE
