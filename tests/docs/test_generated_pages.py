"""Tests that the generated pages agree with the code."""

import pytest

import perdure
from perdure.cli.main import app
from scripts.docs import FOLDER, PAGES, python_api


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_current(name: str):
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), "run: make docs"


def test_every_command_is_told():
    page = PAGES["cli.md"]()
    assert [command.name for command in app.registered_commands if f"### `perdure {command.name}`" not in page] == []


def test_every_public_name_is_told():
    page = PAGES["python-api.md"]()
    assert [name for name in perdure.__all__ if f"## `perdure.{name}`" not in page] == []
    assert "`perdure_training.report`" in page
    assert all(getattr(perdure, name) for name in perdure.__all__)


def test_arguments_and_errors_of_a_method_are_told():
    page = python_api.reference()
    submit = page.partition("### `Client.submit`")[2].partition("###")[0]
    assert "    again: bool = True," in submit
    assert "| `again` | Allow a name that an ended job has used. |" in submit
    assert "| `JobAlreadyRunning` | if a job of that name runs" in submit
    assert "(self" not in submit


def test_what_calls_return_is_told_with_what_that_holds():
    returned = python_api.reference().partition("## Return types")[2]
    assert "### `JobStatus`" in returned
    assert "| `phase` | `JobPhase` |" in returned
    assert "| `RUNNING` | Every member of the world steps" in returned
    assert "`started_at` | `datetime`" in returned
