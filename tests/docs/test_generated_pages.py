"""Tests that the generated pages agree with the code."""

import os
from pathlib import Path

import pytest

import perdure
from perdure.cli.main import app
from scripts.docs import FOLDER, PAGES
from tests.support.running_command import RunningCommand
from tests.support.warm_process import warm_interpreter


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the pages as they should be.

    They are made in a process of their own: Python 3.11 confuses the depths of two threads that parse at the same time
    (gh-106905), and here other tests' workflow threads do.
    """
    folder = tmp_path_factory.mktemp("docs")
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    interpreter = warm_interpreter("tests.support.command_imports")
    assert RunningCommand(interpreter.start("scripts.docs", str(folder), environment=environment)).wait() == 0
    return folder


def page(generated: Path, name: str) -> str:
    return (generated / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_current(generated: Path, name: str):
    assert (FOLDER / name).read_text(encoding="utf-8") == page(generated, name), "run: make docs"


def test_every_command_is_told(generated: Path):
    cli = page(generated, "cli.md")
    assert [command.name for command in app.registered_commands if f"### `perdure {command.name}`" not in cli] == []


def test_every_public_name_is_told(generated: Path):
    api = page(generated, "python-api.md")
    errors = api.partition("## Errors")[2]
    told = {name for name in perdure.__all__ if f"## `perdure.{name}`" in api}
    told |= {name for name in perdure.__all__ if f"\n| `{name}` |" in errors}
    assert set(perdure.__all__) == told
    assert "`perdure_training.report`" in api
    assert all(getattr(perdure, name) for name in perdure.__all__)


def test_arguments_and_errors_of_a_method_are_told(generated: Path):
    submit = page(generated, "python-api.md").partition("### `Client.submit`")[2].partition("###")[0]
    assert "    again: bool = True," in submit
    assert "| `again` | Allow a name that an ended job has used. |" in submit
    assert "| `JobAlreadyRunning` | if a job of that name runs" in submit
    assert "(self" not in submit


def test_what_calls_return_is_told_with_what_that_holds(generated: Path):
    returned = page(generated, "python-api.md").partition("## Return types")[2]
    assert "### `perdure.JobStatus`" in returned
    assert "| `phase` | `JobPhase` |" in returned
    assert "| `RUNNING` | Every member of the world steps" in returned
    assert "`started_at` | `datetime`" in returned
