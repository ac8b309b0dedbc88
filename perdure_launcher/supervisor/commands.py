"""Parses the user's command: decides whether it starts torchrun, or the launcher itself must start the ranks."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from perdure_training.secret_texts import command_without_secrets

from ..system.program_signals import SHELLS

BACKEND = "perdure"

_DEEPSPEED = frozenset({"deepspeed", "deepspeed.pt", "ds", "deepspeed.launcher.runner", "deepspeed.launcher.launch"})
_LAUNCHERS = frozenset({"torchrun", "accelerate", "accelerate-launch", "deepspeed"})
_LIGHTNINGS = frozenset({"fabric", "lightning"})
"""Commands whose `run` subcommand starts torchrun."""
_MODULES = frozenset(
    {
        *("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"),
        *("deepspeed.launcher.runner", "deepspeed.launcher.launch"),
    }
)
_RUNNERS = frozenset({"cProfile", "coverage", "debugpy", "memray", "pdb", "profile", "scalene", "trace", "viztracer"})
"""Modules that run another program, which they are told by further words."""
_IN_SHELL = re.compile(
    r"(?<![\w.-])(?:(?:torchrun|accelerate|accelerate-launch|deepspeed)(?![\w.-])|(?:fabric|lightning)\s+run\b)"
    r"|(?:torch\.distributed|accelerate\.commands)\.(?:run|launch)\b|deepspeed\.launcher\.\w+"
)
_CLIENTS = {
    **dict.fromkeys(("docker", "podman", "nerdctl"), frozenset({"run", "exec"})),
    "kubectl": frozenset({"exec"}),
    **dict.fromkeys(("ssh", "screen", "tmux")),
}
"""Programs that have another process start a command, and their subcommands that do."""
_LAUNCHED_THERE = re.compile(
    r"(?:^|[\s/])(?:torchrun|accelerate launch|deepspeed)\s|\btorch\.distributed\.(?:run|launch)\s"
)
_SCRIPT_BYTES = 65536
_OPTIONS_WITHOUT_VALUE = frozenset({"--standalone", "--virtual-local-rank", "--use-env"})
_OPTIONS_OF_OTHER_PROGRAMS = frozenset({"--no-python", "--run-path", "-h", "--help"})
_DEEPSPEED_OPTIONS_WITHOUT_VALUE = frozenset(
    {
        *("--module", "--no_python", "--no_local_rank", "--no_ssh", "--no_ssh_check", "--force_multi", "-q", "--quiet"),
        *("--elastic_training", "--enable_elastic_training", "--bind_cores_to_rank", "--save_pid"),
        *("-h", "--help"),
    }
)
_DEEPSPEED_OPTIONS_OF_TORCHRUN = {"--module": "-m", "--no_python": "--no-python"}


def starts_torchrun(command: Sequence[str], *, workdir: Path) -> bool:
    """Returns whether the command starts torchrun, or another launcher that uses torchrun's machinery.

    It recognizes the launchers themselves (also after `uv run`, `env` and the like), `python -m torch.distributed.run`,
    and shell scripts that name one of them. It does not look into Python programs.
    """
    words = list(_before_script(command))
    names = [os.path.basename(word) for word in words]
    if _LAUNCHERS.intersection(names) or _MODULES.intersection(words):
        return True
    if any(name in _LIGHTNINGS and after == "run" for name, after in pairwise(names)):
        return True
    if names and names[0] in SHELLS:
        return any(_names_launcher(text) for text in _shell_texts(words[1:], workdir))
    return bool(words) and _names_launcher(_script_text(workdir / words[0]))


def begins_with_torchrun(command: Sequence[str]) -> bool:
    """Returns whether the command starts nothing but torchrun or another launcher; a script may do other work first."""
    words = list(_before_script(command))
    names = [os.path.basename(word) for word in words]
    if names and names[0] in SHELLS:
        return False
    return bool(_LAUNCHERS.intersection(names) or _MODULES.intersection(words) or _LIGHTNINGS.intersection(names))


def launches_elsewhere(command: Sequence[str]) -> str:
    """Returns the program by which a command has torchrun started outside of its own processes, as in a container;
    empty for other commands."""
    words = list(command)
    if words and os.path.basename(words[0]).startswith("python"):
        del words[0]
    program = os.path.basename(words[0]) if words else ""
    if program not in _CLIENTS:
        return ""
    subcommands = _CLIENTS[program]
    if subcommands is not None and not subcommands.intersection(words[1:]):
        return ""
    return program if _LAUNCHED_THERE.search(" ".join([*words[1:], ""])) else ""


def instead_of_deepspeed(command: Sequence[str]) -> str:
    """Returns the command to use instead of DeepSpeed's own launcher; empty for other commands.

    That launcher assigns its ranks in a world of its own, on this machine or over ssh. People read the returned
    command, so secrets are replaced in it.
    """
    words = list(command)
    if words and os.path.basename(words[0]).startswith("python"):
        del words[0]
        while words and words[0].startswith("-"):
            if words.pop(0) == "-m":
                break
    if len(words) < 2 or os.path.basename(words[0]) not in _DEEPSPEED:
        return ""
    instead = ["torchrun"]
    rest = iter(words[1:])
    for word in rest:
        name, _, value = word.partition("=")
        if not name.startswith("-"):
            return shlex.join(command_without_secrets([*instead, word, *rest]))
        if name in _DEEPSPEED_OPTIONS_WITHOUT_VALUE:
            instead += [_DEEPSPEED_OPTIONS_OF_TORCHRUN[name]] if name in _DEEPSPEED_OPTIONS_OF_TORCHRUN else []
            continue
        value = value or next(rest, "")
        if name in ("--num_gpus", "--num_accelerators"):
            instead.append(f"--nproc-per-node={value}")
    return "torchrun SCRIPT"


@dataclass(frozen=True)
class RankCommand:
    """The command that torchrun will start as each rank."""

    python: str
    arguments: tuple[str, ...]
    processes: int | None
    """Ranks per node, if the command sets a number."""


def expected_ranks(command: Sequence[str], *, path: str, workdir: Path) -> RankCommand | None:
    """Predicts from the command alone what torchrun will start; None if the command does not determine it.

    The result is a guess; torchrun's own handler determines the launch later.
    """
    if not command or (program := shutil.which(command[0], path=path)) is None:
        return None
    program = str(workdir / program)
    name = os.path.basename(program)
    if name == "torchrun":
        python, options = _interpreter_of(program), command[1:]
    elif name.startswith("python") and tuple(command[1:3]) == ("-m", "torch.distributed.run"):
        python, options = program, command[3:]
    else:
        return None
    return _ranks_of(python, options) if python else None


def _ranks_of(python: str, options: Sequence[str]) -> RankCommand | None:
    module = False
    processes: int | None = None
    words = iter(options)
    for word in words:
        name, _, value = word.partition("=")
        name = name.replace("_", "-")
        if not name.startswith("-"):
            flags = ("-u", "-m") if module else ("-u",)
            return RankCommand(python, (*flags, word, *words), processes)
        if name in _OPTIONS_OF_OTHER_PROGRAMS:
            return None
        if name in ("-m", "--module"):
            module = True
        elif name not in _OPTIONS_WITHOUT_VALUE:
            value = value or next(words, "")
            if name == "--nproc-per-node":
                if not value.isdecimal():
                    return None
                processes = int(value)
    return None


def _interpreter_of(program: str) -> str | None:
    """Returns the interpreter in a script's first line."""
    try:
        with open(program, "rb") as file:
            first_line = file.readline(_SCRIPT_BYTES)
    except OSError:
        return None
    if not first_line.startswith(b"#!"):
        return None
    words = os.fsdecode(first_line[2:]).split()
    return words[0] if len(words) == 1 and os.path.basename(words[0]).startswith("python") else None


def _before_script(command: Sequence[str]) -> Iterable[str]:
    """Yields the words before the Python program; later words are the program's own arguments."""
    before = ""
    for word in command:
        if word.endswith(".py") and " " not in word:
            return
        yield word
        if before == "-m" and word not in _RUNNERS:
            return
        before = word


def _shell_texts(arguments: Sequence[str], workdir: Path) -> Iterable[str]:
    for index, word in enumerate(arguments):
        if word.startswith("-") and "c" in word[1:] and not word.startswith("--"):
            yield from arguments[index + 1 : index + 2]
            return
        if not word.startswith("-"):
            yield _script_text(workdir / word)
            return


def _script_text(path: Path) -> str:
    """Returns a shell script's text; empty for other files."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            content = file.read(_SCRIPT_BYTES)
    except OSError:
        return ""
    first_line = content.split(b"\n", 1)[0]
    if b"\0" in content or (first_line.startswith(b"#!") and b"sh" not in first_line):
        return ""
    return content.decode(errors="replace")


def _names_launcher(text: str) -> bool:
    return any(_IN_SHELL.search(line) for line in text.splitlines() if not line.lstrip().startswith("#"))
