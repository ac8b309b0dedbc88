"""Tests of what commands import: most of the time of a short command is imports, and their number does not vary."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json
import sys

from perdure.base.services import leave
from perdure.cli.main import run_command

for commands in json.loads(sys.argv[1]):
    for arguments in commands:
        run_command(arguments)
    print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules} | set(sys.modules))))
leave(0)
"""

MODELS = {"pydantic", "perdure.contract", "perdure.workflows", "perdure.spec"}
"""Models of the specification and of messages, which pydantic builds when they are imported."""
CONNECTION = {"temporalio", "google", "grpc", "cryptography"}
PARTS = {"perdure.activities", "perdure.agent", "perdure.workflows.policy.state.job", "pathspec", "yaml", "torch"}
"""What only some commands need: to upload code, to read a specification or a log, to decide."""


def imported(*commands: list[list[str]]) -> list[set[str]]:
    """Returns the modules that a new process has imported after each of these series of commands."""
    run = [sys.executable, "-P", "-c", PROGRAM, json.dumps(commands)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    return [set(json.loads(line)) for line in done.stdout.splitlines() if line.startswith('["')]


def test_what_asks_no_server_imports_no_client_and_no_models() -> None:
    bare, help_of_a_command = imported([["--version"], ["--help"], ["--no-such-option"]], [["run", "--help"]])
    assert bare & (MODELS | CONNECTION | PARTS) == set()
    # typer itself converts the options of commands with pydantic.
    assert help_of_a_command & (MODELS | CONNECTION | PARTS) == {"pydantic"}


def test_a_question_to_a_job_imports_only_what_asks_it() -> None:
    [found] = imported([["status", "no-such-job", "--address", "127.0.0.1:1"]])
    assert {"temporalio", "perdure.client.client"} <= found
    assert found & PARTS == set()
