"""Tests every command that README and docs print: the called program parses it, and runs it if it needs no job."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from typer import Typer
from typer.core import TyperGroup
from typer.main import get_command

from perdure.cli.main import app
from tests.docs.commands import COMMANDS, Command
from tests.docs.pages import ROOT
from tests.support.command_line import CommandLine
from tests.support.temporal_server import temporal_binary

NOT_RUN_HERE = {
    ".": "enters the environment that `make setup` makes",
    "curl": "asks an agent's socket: tests/docs/test_docs_names.py compares the requests",
    "docker": "no docker is here: scripts/cluster makes the same image; test_docs_names.py checks its file",
    "helm": "tests/kubernetes/test_printed_commands.py",
    "kubectl": "tests/kubernetes/test_printed_commands.py",
    "export": "a setting of the reader's shell",
    "jq": "reads what `temporal` prints: tests/system/test_temporal_recipes.py runs both",
    "kill": "breaks the reader's job: tests/system/test_readme.py does it to a job of its own",
    "ray": "is in an environment of its own: tests/system/test_ray.py starts clusters",
    "pgrep": "finds the process to kill",
    "pkill": "breaks the reader's server: tests/system/test_survival.py does it to its own",
    "tee": "keeps what the command before it prints",
    "uv": "installs from the network; .venv/bin/perdure is the same package",
    "srun": "Slurm is not here: tests/system/test_slurm_example.py plays it; the command that it starts is checked",
}
"""Programs whose commands no test in this file reads, and why, or which test does."""

PLACEHOLDERS = {"COMMAND": "status", "RANK": "0", "NUMBER": "1"}
"""Values for placeholders that accept only certain values."""

ON_JOBS = "tests/cli/test_cli_with_jobs.py"
HELD_ELSEWHERE = {
    **dict.fromkeys(("list", "status", "watch", "logs", "explain", "nodes", "scale"), ON_JOBS),
    **dict.fromkeys(("suspend", "resume", "restart", "cancel", "pause-repairs", "resume-repairs"), ON_JOBS),
    "stacks": "tests/system/test_hangs.py",
    "check": "tests/system/test_checks.py",
    "plan": "tests/cli/test_cli_plan.py",
    "cluster": "tests/activities/cluster/test_cluster_watch.py",
    "history": "tests/cli/test_cli_history.py",
    **dict.fromkeys(("ui", "report", "plot"), "tests/cli/test_cli_page.py"),
    "top": "tests/cli/test_cli_top.py",
    "shell": "tests/cli/test_cli_shell.py",
    "join": "tests/cli/test_cli_join.py",
    "ticket": "tests/system/test_joining_by_ticket.py",
    "doctor": ON_JOBS,
    "checkpoint": "tests/system/test_durable_checkpoints.py",
    "worker": "tests/cli/test_cli_without_jobs.py",
    "operator": "tests/kubernetes/test_operator.py",
    "secret": "tests/security/test_secrets.py",
    "notify": "tests/cli/test_cli_notify.py",
    **dict.fromkeys(("temporal", "codec-server", "payload-keys"), "tests/security/test_codec_server.py"),
    "gateway": "tests/security/cluster/test_gateway.py",
    "page": "tests/cli/test_cli_page.py",
}
"""Commands of perdure that need a server or a job: only parsed here, and run by these tests."""


def of(*programs: str) -> list[Command]:
    return list(dict.fromkeys(command for command in COMMANDS if command.program in programs))


def check_each(commands: list[Command], check: Callable[[Command], None]) -> None:
    """Checks all commands, each once however often it is printed, and fails with all that is wrong."""
    once = {(command.words, command.settings, command.whole): command for command in reversed(commands)}
    wrong: list[str] = []
    for command in once.values():
        try:
            check(command)
        except AssertionError as error:
            wrong.append(f"{command}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def root() -> TyperGroup:
    """The command `perdure`."""
    root = get_command(app)
    assert isinstance(root, TyperGroup)
    return root


def test_every_command_is_checked_or_exempt():
    checked = {"perdure", "make", "temporal", "python", "pytest"}
    assert sorted({command.program for command in COMMANDS} - checked - NOT_RUN_HERE.keys()) == []
    assert sorted(NOT_RUN_HERE.keys() - {command.program for command in COMMANDS}) == [], "exempt, and not printed"
    assert len(of("perdure")) > 50


def test_commands_that_need_a_job_are_run_by_the_tests_that_are_named(root: TyperGroup):
    assert root.commands.keys() - HELD_ELSEWHERE.keys() == {"run", "submit", "validate", "schema", "import"}
    named = {name: (ROOT / path).read_text() for name, path in HELD_ELSEWHERE.items() if name in root.commands}
    assert [name for name, text in named.items() if f'"{name}"' not in text] == []


def test_perdure_knows_each_command_and_its_options(root: TyperGroup):
    def parse(command: Command) -> None:
        name, *arguments = [PLACEHOLDERS.get(word, word) for word in command.words[1:]]
        assert name in root.commands, "no such command"
        arguments = [argument for argument in arguments if argument not in ("…", "--help")]
        try:
            root.commands[name].make_context(name, arguments)
        except Exception as error:
            # A part of a command may lack what the text around it says.
            unfinished = type(error).__name__ == "MissingParameter" or "requires an argument" in str(error)
            if command.whole or not unfinished:
                raise AssertionError(error) from error

    check_each(of("perdure"), parse)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a reader's files: a job, other systems' jobs, the examples."""
    fixtures = ROOT / "tests" / "importers" / "fixtures"
    job = (ROOT / "examples" / "01-first-job" / "minimal.yaml").read_text(encoding="utf-8")
    for name in ("job.yaml", "first.yaml"):
        (tmp_path / name).write_text(re.sub(r"path: .*", "path: .", job), encoding="utf-8")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.yaml").write_text((tmp_path / "job.yaml").read_text(), encoding="utf-8")
    (tmp_path / "pytorchjob.yaml").write_text((fixtures / "pytorchjob-elastic.yaml").read_text(), encoding="utf-8")
    (tmp_path / "elasticjob.yaml").write_text((fixtures / "elasticjob-llama.yaml").read_text(), encoding="utf-8")
    for name in ("examples", "train.py", "prepare.py"):
        (tmp_path / name).symlink_to(ROOT / ("examples" if name == "examples" else "examples/01-first-job/train.py"))
    return tmp_path


RUNNABLE = [
    command
    for command in of("perdure")
    if command.whole and command.words[1] not in HELD_ELSEWHERE and "-" not in command.words
]


def test_perdure_does_what_needs_no_job(folder: Path):
    environment = {
        "PERDURE_STATE": str(folder / "state"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command_line = CommandLine(folder, environment)

    def run(command: Command) -> None:
        name, *arguments = command.words[1:]
        arguments = [argument for argument in arguments if argument not in ("--wait", "--run")]
        before = [] if name not in ("run", "submit") else ["--dry-run"]
        if any("*" in argument for argument in arguments):
            arguments = [str(path) for argument in arguments for path in (sorted(folder.glob(argument)) or [argument])]
        done = command_line.run(name, *before, *arguments)
        # An import may leave fields to its reader; that is told apart by what it prints.
        assert done.code == 0 or (name == "import" and done.code == 2 and done.out), done
        assert done.out

    check_each(RUNNABLE, run)


@pytest.fixture(scope="module")
def makefile() -> str:
    """The text of the Makefile."""
    return (ROOT / "Makefile").read_text(encoding="utf-8")


def test_make_has_each_target(makefile: str):
    targets = makefile.partition(".PHONY:")[2].partition("\n")[0].split()
    printed = of("make")

    def find(command: Command) -> None:
        target, *variables = [word for word in command.words[1:] if word != "…"]
        assert target in targets
        for variable in variables:
            name = variable.partition("=")[0]
            assert f"\n{name} ?=" in makefile, f"there is no variable {name}"

    check_each(printed, find)
    words = sorted({word for command in printed for word in command.words[1:] if word != "…"})
    done = subprocess.run(["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def benchmark_arguments() -> list[tuple[str, str]]:
    """For which benchmark, and what it is given by BENCH_ARGS."""
    found: list[tuple[str, str]] = []
    for page in sorted({command.page for command in COMMANDS}):
        text = (ROOT / page).read_text(encoding="utf-8")
        target = ""
        for match in re.finditer(r"make bench-(\w+)|BENCH_ARGS=(?:'([^']*)'|\"([^\"]*)\"|([^`\s]+))", text):
            if match[1]:
                target = match[1]
            else:
                after = re.match(r"[^`]* make bench-(\w+)", text[match.end() :])
                found.append((after[1] if after else target, match[2] or match[3] or match[4]))
    return found


def test_benchmarks_take_their_arguments():
    for benchmark, arguments in benchmark_arguments():
        single = Typer()
        single.command()(import_module(f"benchmarks.{benchmark}.__main__").main)
        get_command(single).make_context(benchmark, arguments.split())


def test_python_finds_what_it_is_to_run():
    def find(command: Command) -> None:
        words = [word for word in command.words[1:] if word != "…"]
        if words[:2] == ["-m", "pytest"]:
            return
        if words[0] == "-m" and words[1] != "package":
            module = ROOT / words[1].replace(".", "/")
            is_module = module.is_dir() or module.with_suffix(".py").is_file()
            assert is_module or words[1].startswith("torch.distributed."), "no such module"
        else:
            is_known = words[0] in ("train.py", "-m", "-c") or (ROOT / words[0]).is_file()
            assert is_known, "neither the reader's script, nor a file of this repository, nor a module"

    check_each(of("python"), find)


def words_for_pytest(command: Command) -> list[str]:
    """Returns the arguments that a command has for pytest."""
    match command.words:
        case (_, "-m", "pytest", *words):
            return words
        case ("pytest", *words):
            return words
        case _:
            given = [word.partition("=")[2] for word in command.words if word.startswith("PYTEST_ARGS=")]
            return [word for argument in given for word in shlex.split(argument) if word != "…"]


def test_pytest_finds_what_it_is_to_run(pytestconfig: pytest.Config):
    words = [word for command in of("make", "python", "pytest") for word in words_for_pytest(command)]
    places = [word for word in words if word.startswith("tests/")]
    assert places
    assert [place for place in places if not (ROOT / place).exists()] == []
    options = [word for word in words if word not in places]
    # Refused with an error: what neither pytest, nor a plugin, nor tests/conftest.py knows.
    chosen = pytestconfig._parser.parse(options)
    assert chosen.file_or_dir == []


def test_temporal_knows_each_command_and_its_options(tmp_path: Path):
    environment = {**os.environ, "HOME": str(tmp_path)}
    extension = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

    def parse(command: Command) -> None:
        words = [word for word in command.words[1:] if word != "…"]
        if words[0] == "perdure":
            assert "temporal-perdure" in extension, "our extension of Temporal's command line"
            return
        # A server that is started calls none.
        starts = words[0] == "server"
        if len(words) == 1 or starts:
            words.append("--help")
        run = [temporal_binary(), words[0], *([] if starts else ["--address=127.0.0.1:1"]), *words[1:]]
        done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        said = done.stdout + done.stderr
        assert not re.search(r"unknown (shorthand )?(flag|command)", said), said
        if command.whole and not starts:
            assert "127.0.0.1:1" in said or "job.json" in said, f"it did not come to call the server: {said}"

    check_each(of("temporal"), parse)
