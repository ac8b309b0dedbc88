"""Tests that docs/events.md has the vocabulary of the code, and that its scripts run as printed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import pytest
import yaml

from perdure.spec.validate import validate_spec
from perdure_training.events import AgentEvents, EventEmitter, JobEvents, Span, TrainerEvents
from perdure_training.events.process import VARIABLE
from tests.docs.pages import PAGES
from tests.training.events.collected import run

[PAGE] = [page for page in PAGES if page.name == "docs/events.md"]
SCRIPTS = [block for block in PAGE.blocks if block.language == "python"]


def rows(vocabulary: type[EventEmitter]) -> Iterator[str]:
    """The rows of its table."""
    for name, method in vars(vocabulary).items():
        if not name.startswith("_"):
            signature = inspect.signature(method, eval_str=True)
            named = [f"`{one}`" for one in signature.parameters if one not in ("self", "attributes")]
            kind = "span" if signature.return_annotation is Span else "instant"
            yield f"| `{name}` | {kind} | {', '.join(named)} | {inspect.getdoc(method)} |"


@pytest.mark.parametrize("vocabulary", [TrainerEvents, AgentEvents, JobEvents])
def test_each_predefined_event_is_told(vocabulary: type[EventEmitter]):
    told = PAGE.path.read_text(encoding="utf-8").partition(f"\n`{vocabulary.__name__}`, ")[2].partition("\n\n")[2]
    assert told.partition("\n\n")[0].splitlines()[2:] == list(rows(vocabulary))


def test_the_script_runs_as_printed():
    printed = [line.partition(" ")[2] for line in run(SCRIPTS[0].text).splitlines()]
    assert printed[0] == "trainer rank=0 start instant world_size=1"
    assert printed[-1] == "data shard_opened instant shard=3 samples=10000"
    assert [line.split()[2] for line in printed[1:-1]].count("save.write") == 2


def test_an_exporter_whose_destination_is_away_does_no_harm():
    assert run(SCRIPTS[1].text) == ""


def test_the_variables_of_a_job_are_accepted():
    [variables] = re.findall(r"For example, `env: (\{.*\})`", PAGE.path.read_text(encoding="utf-8"))
    job = f"name: a\nroles: {{worker: {{nodes: 1, command: [python, a.py]}}}}\nenv: {variables}\n"
    spec, warnings = validate_spec(yaml.safe_load(job))
    assert warnings == ()
    assert spec.env[VARIABLE] == "file,otlp"
