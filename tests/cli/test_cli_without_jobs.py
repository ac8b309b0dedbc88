"""Tests of the command line before any job exists: help, specifications, and an unreachable control plane."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import CommandLine
from tests.support.temporal_server import temporal_binary

COMMANDS = [
    *("run", "submit", "validate", "schema", "import"),
    *("list", "status", "watch", "logs", "explain", "nodes"),
    *("scale", "suspend", "resume", "restart", "pause-repairs", "resume-repairs", "cancel"),
    *("worker", "doctor"),
]

GOOD = "name: good\nroles:\n  worker:\n    nodes: 2:4\n    command: [torchrun, train.py]\n"


def test_help_is_quick_and_names_every_command(bare_command_line: CommandLine) -> None:
    shown = bare_command_line.run("--help")
    assert shown.code == 0
    assert all(re.search(rf"\b{command}\b", shown.out) for command in COMMANDS)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in ("doctor", "worker", "schema")])
def test_help_of_each_command_teaches_by_an_example(bare_command_line: CommandLine, command: str) -> None:
    shown = bare_command_line.run(command, "--help")
    assert shown.code == 0
    assert f"perdure {command}" in shown.out.replace("Usage: perdure", "")


def test_a_script_that_is_not_executable_is_not_said_to_be_missing(bare_command_line: CommandLine) -> None:
    script = bare_command_line.folder / "job.sh"
    script.write_text("torchrun train.py\n")
    done = bare_command_line.run("run", "--", str(script))
    assert done.code == 2
    assert f'roles.worker.command: "{script}" in' in done.err
    assert "is not executable" in done.err
    assert f"bash {script}" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["status"], "Missing argument 'NAME'"),
        (["frobnicate"], "No such command 'frobnicate'"),
        (["run"], "Missing argument"),
        (["run", "--nodes", "2", "job.yaml"], "the file sets this; change it there"),
        (["run", "--nodes", "4:2", "--", "sh", "-c", "true"], "min is 4 and max is 2"),
        (["run", "--nodes", "many", "--", "sh", "-c", "true"], 'roles.worker.nodes: got "many"'),
        (["run", "--nproc-per-node", "0", "--", "sh", "-c", "true"], "expected an integer from 1 to 1024"),
        (["run", "--name", "Not A Name", "--", "sh", "-c", "true"], "name: got"),
        (["run", "--env", "NOT_SET_HERE", "--", "sh", "-c", "true"], "NOT_SET_HERE is not set here"),
        (["run", "--env", "RANK=1", "--", "sh", "-c", "true"], "RANK"),
        (["run", "--", "no-such-program-anywhere", "x"], 'there is no program "no-such-program-anywhere" on PATH'),
        (["run", "--", "FOO=1", "torchrun", "a.py"], "perdure run --env FOO=1 --"),
        (["run", "--", "torchrun a.py --lr 1"], "-- bash -c 'torchrun a.py --lr 1'"),
        (["run", "--", "source", "venv/bin/activate"], "-- bash -c 'source venv/bin/activate && …'"),
        (["run", "--", "./no-such-script.sh"], 'there is no program "./no-such-script.sh" in'),
        (["run", "--backend", "cloud", "--", "sh", "-c", "true"], "backend"),
        (["run", "missing.yaml"], "missing.yaml: No such file or directory"),
        (["submit", "missing.yaml"], "missing.yaml: No such file or directory"),
        (["validate", "missing.yaml"], "cannot be read: No such file or directory"),
        (["scale", "x", "some"], 'NODES: got "some"; expected a number such as 4, a range such as 2:8, or auto'),
        (["scale", "x", "4", "--scale-plan", "plan.yaml"], "the plan states nodes, roles and resources itself"),
        (["scale", "x", "--scale-plan", "missing.yaml"], "missing.yaml: No such file or directory"),
        (["scale", "x"], "name the number of nodes, such as 2:8, a goal, such as --finish-by 6h"),
        (["scale", "x", "--finish-by", "2026-12-01T08:00:00"], "expected a time with its zone such as 2026-12-01T"),
        (["list", "-o", "yaml"], "'yaml'"),
        (["worker", "--metrics-port", "99999"], "65535"),
    ],
)
def test_wrong_use_exits_with_2_and_says_what_is_wrong(
    bare_command_line: CommandLine, arguments: list[str], words: str
) -> None:
    done = bare_command_line.run(*arguments)
    assert done.code == 2, done
    assert words in re.sub(r"[\s│]+", " ", done.out + done.err)
    assert not (bare_command_line.folder / "state").exists(), "nothing was started"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: x\n", "roles: missing"),
        ("name: x\nroles:\n  worker:\n    nods: 2\n    command: [x]\n", 'did you mean "nodes"? (line 4)'),
        ("name: x\nroles: {worker: {nodes: 2, command: torchrun train.py}}\n", "[torchrun, train.py]"),
        ("name: x\nroles: {worker: {nodes: 2, command: [x]}}\nlimits: {active_deadline: soon}\n", "active_deadline"),
        ("name: x\nbackend: locale\nroles: {worker: {nodes: 2, command: [x]}}\n", 'did you mean "local"?'),
        ("name: [\n", "not valid YAML at line 2"),
        ("name: x\nname: y\nroles: {worker: {nodes: 2, command: [x]}}\n", 'the key "name" is already on line 1'),
        ("[]\n", "mapping"),
        ("", "mapping"),
    ],
)
def test_every_command_refuses_a_wrong_file_with_the_same_words(
    bare_command_line: CommandLine, text: str, words: str
) -> None:
    bare_command_line.write("job.yaml", text)
    for arguments in (["validate", "job.yaml"], ["submit", "job.yaml"], ["run", "job.yaml"]):
        done = bare_command_line.run(*arguments)
        assert done.code == 2, done
        assert words in done.err
        assert not done.out


def test_validate_reports_each_file(bare_command_line: CommandLine) -> None:
    bare_command_line.write("good.yaml", GOOD)
    bare_command_line.write("bad.yaml", "name: bad\n")
    text = bare_command_line.run("validate", "good.yaml", "bad.yaml")
    assert text.code == 2
    assert "good.yaml: ok, good: 2:4 nodes of worker, backend local" in text.out
    assert "bad.yaml: 1 wrong" in text.err
    reports = bare_command_line.run("validate", "good.yaml", "bad.yaml", "-o", "json").json
    assert [(report["file"], report["valid"]) for report in reports] == [("good.yaml", True), ("bad.yaml", False)]
    assert reports[0]["warnings"], "an elastic job's batch may shrink"
    assert bare_command_line.run("validate", "good.yaml").code == 0


def test_without_a_history_a_file_is_valid_and_the_default_is_shown_with_the_reason(
    bare_command_line: CommandLine,
) -> None:
    role = "worker: {nodes: auto, resources: auto, image: 'acme/llama:1', command: [torchrun, train.py]}"
    bare_command_line.write("auto.yaml", f"name: auto\nbackend: kubernetes\nroles: {{{role}}}\n")
    default = "4 processors and 16Gi of memory for each node, by default: no Temporal server"
    assert f"auto.yaml: worker: {default}" in bare_command_line.run("validate", "auto.yaml").out
    [report] = bare_command_line.run("validate", "auto.yaml", "-o", "json").json
    assert (report["valid"], report["auto"][0]["memory"]) == (True, "16Gi")
    dry = bare_command_line.run("submit", "--dry-run", "auto.yaml")
    assert f"for worker: {default}" in dry.err
    assert "no Temporal server" not in dry.out


def test_schema_is_json_schema(bare_command_line: CommandLine) -> None:
    schema = bare_command_line.run("schema").json
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert "roles" in schema["properties"]


def test_dry_run_prints_an_equivalent_file(bare_command_line: CommandLine) -> None:
    shown = bare_command_line.run(
        "run", "--dry-run", "--nodes", "2:4", "--name", "same", "--env", "A=1", "--", "sh", "-c", "exit 0"
    )
    assert shown.code == 0
    bare_command_line.write("same.yaml", shown.out)
    again = bare_command_line.run("run", "--dry-run", "same.yaml", "-o", "json").json
    assert again["name"] == "same"
    assert again["roles"]["worker"]["nodes"] == {"min": 2, "max": 4}
    assert again["workdir"] == {"path": str(bare_command_line.folder)}
    assert again["env"]["A"] == "1"
    assert "PATH" in again["env"]
    assert not (bare_command_line.folder / "state").exists(), "nothing was started"


def test_names_are_made_of_the_script(bare_command_line: CommandLine) -> None:
    bare_command_line.write("my_train.sh", "true\n")
    names = {
        bare_command_line.run("run", "--dry-run", "-o", "json", "--", "sh", "my_train.sh").json["name"]
        for _ in range(2)
    }
    assert len(names) == 2
    assert all(re.fullmatch(r"my-train-[0-9a-f]{4}", name) for name in names)


NEEDS_SERVER = [
    ["list"],
    ["status", "x"],
    ["watch", "x"],
    ["logs", "x"],
    ["explain", "x"],
    ["nodes", "x"],
    ["scale", "x", "2"],
    ["suspend", "x"],
    ["resume", "x"],
    ["restart", "x"],
    ["pause-repairs", "x"],
    ["resume-repairs", "x"],
    ["cancel", "x"],
    ["worker"],
    ["doctor"],
]


@pytest.mark.parametrize("arguments", NEEDS_SERVER, ids=lambda arguments: arguments[0])
def test_a_dead_server_is_exit_code_6_soon(bare_command_line: CommandLine, arguments: list[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        bare_command_line.environment = {
            **bare_command_line.environment,
            "TEMPORAL_ADDRESS": f"127.0.0.1:{probe.getsockname()[1]}",
        }
        done = bare_command_line.run(*arguments, within=60)
    assert done.code == 6, done
    assert "does not answer: connection refused" in done.out + done.err
    assert "Check TEMPORAL_ADDRESS" in done.out + done.err


def test_a_silent_server_is_exit_code_6_soon(bare_command_line: CommandLine) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        done = bare_command_line.run("list", "--address", address, within=60)
    assert done.code == 6, done
    assert f"the Temporal server at {address} does not answer" in done.err


def test_no_server_at_all_says_how_to_start_one(bare_command_line: CommandLine) -> None:
    done = bare_command_line.run("list", "-o", "json")
    assert done.code == 6
    assert done.json["error"]["exit_code"] == 6
    assert "perdure run" in done.json["error"]["remedy"]


@pytest.mark.parametrize("arguments", [["run", "--", "sh", "-c", "true"], ["list"], ["worker", "--detach"]])
def test_a_state_folder_of_another_version_is_refused(bare_command_line: CommandLine, arguments: list[str]) -> None:
    state = bare_command_line.folder / "state"
    state.mkdir()
    (state / "version").write_text("0\n")
    done = bare_command_line.run(*arguments)
    assert done.code == 6, done
    assert "older format 0" in done.err
    assert "PERDURE_STATE" in done.err


def test_a_full_disk_in_the_state_folder_is_refused(bare_command_line: CommandLine) -> None:
    state = bare_command_line.folder / "state"
    state.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(state)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.strip()}")
    try:
        done = bare_command_line.run("run", "--", "sh", "-c", "true")
    finally:
        subprocess.run(["umount", "--lazy", str(state)], check=True)
    assert done.code == 6, done
    assert "is full" in done.err
    assert "Free some space" in done.err


def test_temporals_own_command_line_finds_us(bare_command_line: CommandLine) -> None:
    """It moves its own global options in front of the subcommand."""
    temporal = temporal_binary()
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    bare_command_line.environment = {**bare_command_line.environment, "PATH": path}
    help_ = bare_command_line.run("perdure", "--help", program=[str(temporal)])
    assert help_.code == 0
    assert "temporal perdure" in help_.out
    refused = bare_command_line.run(
        *("perdure", "list", "--output", "json"),
        *("--color", "never", "--log-level", "error", "--time-format", "iso"),
        program=[str(temporal)],
    )
    assert refused.code == 6, refused
    assert refused.json["error"]["exit_code"] == 6
