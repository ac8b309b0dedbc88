"""Tests of `perdure join` before it connects: its arguments, and those in the examples."""

from __future__ import annotations

import re
import shlex

import yaml

from perdure.spec.validate import validate_spec
from tests.support.allocation import REPOSITORY
from tests.support.command_line import CommandLine

EXAMPLES = REPOSITORY / "examples"


def test_wrong_options_are_named(command_line: CommandLine) -> None:
    for options, words in (
        (["--nodes", "2"], "needs the job's command"),
        (["--metrics-port", "0"], "Input should be greater than or equal to 1"),
        (["--nproc-per-node", "2"], "is for jobs that --nodes starts"),
        (["--nodes", "many", "--", "true"], "expected a number of nodes such as 4"),
    ):
        done = command_line.run("join", "some-job", *options)
        assert done.code == 2, done
        assert words in " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.err).split()), done.err


def test_a_job_file_is_joined_whatever_backend_it_names(command_line: CommandLine) -> None:
    command_line.write("job.yaml", "name: x\nbackend: kubernetes\nroles: {worker: {nodes: 2, command: [true]}}\n")
    done = command_line.run("join", "some-job", "--spec", "job.yaml", "--nodes", "2")
    assert done.code == 2
    assert "the file sets this" in done.err


def test_a_server_that_is_not_there_is_exit_code_6(command_line: CommandLine) -> None:
    done = command_line.run("join", "some-job", "--address", "127.0.0.1:1")
    assert done.code == 6, done
    assert "does not answer: connection refused" in done.err


def test_the_kubernetes_example_asks_for_what_there_is(command_line: CommandLine) -> None:
    (job,) = yaml.safe_load_all((EXAMPLES / "06-kubernetes-job" / "job.yaml").read_text())
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    perdure, join, name, *options = container["command"]
    assert (perdure, join, spec["completionMode"]) == ("perdure", "join", "Indexed")
    assert spec["completions"] == spec["parallelism"] == 4
    assert join in shlex.split(command_line.run("--help").out.replace("'", ""))
    nodes, command = options[options.index("--nodes") + 1], options[options.index("--") + 1 :]
    validate_spec({"name": name, "backend": "joined", "roles": {"worker": {"nodes": nodes, "command": command}}})
