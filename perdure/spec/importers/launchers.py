"""Reads commands that start torchrun, or DLRover's superset of it, and their options.

Options that set the size of the world become fields of the specification. Those of the rendezvous are replaced by
Perdure's own. The other options are passed to torchrun as they were written.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from .shell import Word, as_words, plain_word, simple_commands


class Use(Enum):
    """The handling of an option."""

    KEEP = auto()
    """torchrun gets it as before."""
    NODES = auto()
    PROCESSES = auto()
    RESTARTS = auto()
    RENDEZVOUS = auto()
    """Replaced by Perdure's rendezvous."""
    CONFIGURATION = auto()
    """Timeouts of the rendezvous, some of which have fields."""
    UNIT = auto()
    AUTOMATIC = auto()
    """Nodes and processes that the job and the machine determine."""
    DROP = auto()


@dataclass(frozen=True)
class Option:
    """An option of a launcher."""

    use: Use
    takes_value: bool = True
    message: str = ""
    """The replacement for a dropped option, for the warning."""


_KEEP, _KEEP_FLAG = Option(Use.KEEP), Option(Use.KEEP, takes_value=False)
_RENDEZVOUS = Option(Use.RENDEZVOUS, message="Perdure's rendezvous takes its place")

TORCHRUN_OPTIONS: Mapping[str, Option] = {
    "nnodes": Option(Use.NODES),
    "nproc-per-node": Option(Use.PROCESSES),
    "max-restarts": Option(Use.RESTARTS),
    "rdzv-conf": Option(Use.CONFIGURATION),
    "rdzv-backend": _RENDEZVOUS,
    "rdzv-endpoint": _RENDEZVOUS,
    "rdzv-id": _RENDEZVOUS,
    "node-rank": _RENDEZVOUS,
    "master-addr": _RENDEZVOUS,
    "master-port": _RENDEZVOUS,
    "local-addr": _RENDEZVOUS,
    "standalone": Option(Use.RENDEZVOUS, takes_value=False, message="Perdure's rendezvous takes its place"),
    "monitor-interval": _KEEP,
    "start-method": _KEEP,
    "event-log-handler": _KEEP,
    "role": _KEEP,
    "module": _KEEP_FLAG,
    "m": _KEEP_FLAG,
    "no-python": _KEEP_FLAG,
    "run-path": _KEEP_FLAG,
    "use-env": _KEEP_FLAG,
    "virtual-local-rank": _KEEP_FLAG,
    "log-dir": _KEEP,
    "redirects": _KEEP,
    "r": _KEEP,
    "tee": _KEEP,
    "t": _KEEP,
    "log-line-prefix-template": _KEEP,
    "local-ranks-filter": _KEEP,
    "duplicate-stdout-filters": _KEEP,
    "duplicate-stderr-filters": _KEEP,
    "logs-specs": _KEEP,
    "numa-binding": _KEEP,
    "signals-to-handle": _KEEP,
    "shutdown-timeout": _KEEP,
}

_NO_CHECK = "Perdure does not test machines before it trains on them; a node that fails is replaced"

DLROVER_OPTIONS: Mapping[str, Option] = {
    **TORCHRUN_OPTIONS,
    "node-unit": Option(Use.UNIT),
    "auto-config": Option(Use.AUTOMATIC, takes_value=False),
    "precheck": Option(Use.DROP, message=_NO_CHECK),
    "network-check": Option(Use.DROP, takes_value=False, message=_NO_CHECK),
    "comm-perf-test": Option(Use.DROP, takes_value=False, message=_NO_CHECK),
    "exclude-straggler": Option(
        Use.DROP, takes_value=False, message="Perdure does not take slow nodes out before training"
    ),
    "auto-tunning": Option(
        Use.DROP,
        takes_value=False,
        message="Perdure changes neither batch size nor learning rate; set them in the script",
    ),
    "save-at-breakpoint": Option(
        Use.DROP,
        takes_value=False,
        message="Perdure keeps what the script gives to its Checkpointer (docs/checkpoints.md); other scripts resume "
        "from disk",
    ),
    "accelerator": Option(Use.DROP, message="torch finds its devices itself"),
    "training-port": Option(Use.DROP, message="Perdure takes free ports"),
    "numa-affinity": Option(
        Use.DROP, takes_value=False, message="for a similar effect, write torchrun's --numa-binding into the command"
    ),
    "membind-policy": Option(Use.DROP, message="it belongs to --numa-affinity"),
    "ucp-device-type": Option(Use.DROP, message="Perdure converts no checkpoints"),
}

_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch"})
_DLROVER_MODULES = frozenset({"dlrover.trainer.torch.elastic_run", "dlrover.trainer.torch.main"})
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})
_NO_STARTERS = frozenset({"pip", "pip3", "which", "type", "echo", "printf", "apt", "apt-get", "conda"})
"""Programs whose arguments may name a launcher without starting it."""


class LauncherError(ValueError):
    """A command whose launcher cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """An option of a command line."""

    name: str
    """The name, with hyphens, without the leading ones."""
    written: str
    """The option as it is written in the command."""
    value: str
    option: Option


@dataclass(kw_only=True)
class Launch:
    """A command that starts torchrun."""

    dlrover: bool
    """The launcher is `dlrover-run`."""
    program: list[Word]
    """The words that start torchrun, such as `torchrun` or `python -m torch.distributed.run`."""
    given: list[Given] = field(default_factory=list[Given])
    words: dict[str, list[Word]] = field(default_factory=dict[str, list[Word]])
    """The words of each option."""
    rest: list[Word] = field(default_factory=list[Word])
    """The script and its arguments."""
    _command: list[str]
    _start: int
    """The index of the word in the command that starts torchrun, or of the shell text that does."""
    _in_shell: bool

    @property
    def in_shell(self) -> bool:
        """Whether a shell's text starts torchrun, which may do other work before and after it."""
        return self._in_shell

    def last(self, use: Use) -> Given | None:
        """The last option given for this use, which is the one that counts."""
        return next((given for given in reversed(self.given) if given.option.use is use), None)

    def add_variables(self, variables: Mapping[str, str]) -> None:
        """Adds torchrun's options from its environment variables, which the command's own options override.

        Args:
            variables: Values by name, such as `PET_NNODES`.
        """
        options = DLROVER_OPTIONS if self.dlrover else TORCHRUN_OPTIONS
        for variable, value in variables.items():
            name = variable.removeprefix("PET_").lower().replace("_", "-")
            if name in self.words or (option := options.get(name)) is None:
                continue
            if not option.takes_value and value in ("", "0"):
                continue
            words = plain_word(f"--{name}={value}" if option.takes_value else f"--{name}")
            self.words[name] = [words]
            self.given.append(Given(name=name, written=variable, value=value, option=option))

    def essence(self) -> tuple[object, ...]:
        """Returns what is the same for commands that train the same, whatever rendezvous they name."""
        replaced = {Use.RENDEZVOUS, Use.DROP, Use.KEEP}
        sizes = {given.name: given.value for given in self.given if given.option.use not in replaced}
        return (self.dlrover, sizes, self.command())

    def command(self, *, keep: Sequence[Given] = ()) -> list[str]:
        """The command without the options that became fields of the specification, except those in `keep`."""
        names = {given.name for given in self.given if given.option.use is Use.KEEP} | {given.name for given in keep}
        options = [word for name, words in self.words.items() if name in names for word in words]
        before = [*self.program, *options]
        if not self._in_shell:
            return [*self._command[: self._start], *(word.text for word in (*before, *self.rest))]
        text = self._command[self._start]
        start, script = self.program[0].start, self.rest[0].start
        rewritten = (text[:start] + " ".join(word.raw for word in before) + " " + text[script:]).strip()
        if self._command[1:] == ["-c", text] and (words := as_words(rewritten)) is not None:
            return words
        return [*self._command[: self._start], rewritten, *self._command[self._start + 1 :]]


def read_launch(command: Sequence[str]) -> Launch | None:
    """Finds the start of torchrun in a command, or in the shell text that it runs.

    Returns:
        None if the command starts no torchrun that can be seen.

    Raises:
        LauncherError: if it starts several, or one with unknown options.
    """
    words = list(command)
    if words and os.path.basename(words[0]) in _SHELLS:
        index = next(
            (at + 1 for at, word in enumerate(words) if re.fullmatch(r"-[a-z]*c[a-z]*", word) and at + 1 < len(words)),
            None,
        )
        if index is None:
            return None
        starts = [(found, line) for line in simple_commands(words[index]) if (found := find_launcher(line)) is not None]
    else:
        index = None
        line = [plain_word(word) for word in words]
        starts = [(found, line)] if (found := find_launcher(line)) is not None else []
    if len(starts) > 1:
        raise LauncherError(f"starts torchrun {len(starts)} times, and a Perdure job runs one")
    if not starts:
        return None
    (first, last, dlrover), line = starts[0]
    program = [_as_torchrun(word) for word in line[first:last]]
    launch = Launch(
        dlrover=dlrover,
        program=program,
        _command=words,
        _start=first if index is None else index,
        _in_shell=index is not None,
    )
    _read_options(launch, line[last:])
    return launch


def script_of(command: Sequence[str]) -> str | None:
    """Returns the file that a command has torchrun, Python or a shell run; None if it is not certain to be one."""
    program = os.path.basename(command[0]) if command else ""
    if program == "torchrun":
        try:
            launch = read_launch(command)
        except LauncherError:
            return None
        others = {"m", "module", "no-python", "run-path"}
        return launch.rest[0].text if launch and not others & launch.words.keys() else None
    if program in _SHELLS or re.fullmatch(r"python[\d.]*", program):
        harmless = {"-u", "-e", "-x", "-eu", "-ex", "-eux"} if program in _SHELLS else {"-u", "-B", "-O"}
        first = next((word for word in command[1:] if word not in harmless), "-")
        return None if first.startswith("-") else first
    return None


def find_launcher(line: Sequence[Word]) -> tuple[int, int, bool] | None:
    """Finds a command's launcher: the indexes of its start and of its end, and whether it is DLRover's."""
    if line and os.path.basename(line[0].text) in _NO_STARTERS:
        return None
    for index, word in enumerate(line):
        name = os.path.basename(word.text)
        if name in {"torchrun", "dlrover-run"}:
            return index, index + 1, name == "dlrover-run"
        if word.text == "-m" and index + 1 < len(line) and line[index + 1].text in _MODULES | _DLROVER_MODULES:
            return index, index + 2, line[index + 1].text in _DLROVER_MODULES
        if name.endswith(".py"):
            return None
    return None


def _as_torchrun(word: Word) -> Word:
    if os.path.basename(word.text) == "dlrover-run":
        return Word(text="torchrun", raw="torchrun", start=word.start, end=word.end)
    if word.text in _DLROVER_MODULES:
        return Word(text="torch.distributed.run", raw="torch.distributed.run", start=word.start, end=word.end)
    return word


def _read_options(launch: Launch, words: Sequence[Word]) -> None:
    options = DLROVER_OPTIONS if launch.dlrover else TORCHRUN_OPTIONS
    index = 0
    while index < len(words) and words[index].text.startswith("-") and words[index].text != "-":
        word = words[index]
        if word.text == "--":
            index += 1
            break
        written, assigned, value = _split_option(word.text)
        name = _option_name(written, options, abbreviated=not launch.dlrover)
        option = options[name]
        own = [word]
        if option.takes_value and not assigned:
            index += 1
            if index == len(words):
                raise LauncherError(f"{written} has no value")
            value = words[index].text
            own.append(words[index])
        launch.given.append(Given(name=name, written=written, value=value, option=option))
        launch.words.setdefault(name, []).extend(own)
        index += 1
    launch.rest = list(words[index:])
    if not launch.rest:
        raise LauncherError("names no training script")


def _split_option(word: str) -> tuple[str, str, str]:
    """Splits a word into an option, the separator, and the value, if that is in the same word: `--tee=3`, `-t3`."""
    if word.startswith("--") or len(word) == 2:
        return word.partition("=")
    return word[:2], word[:2], word[2:].removeprefix("=")


def _option_name(written: str, options: Mapping[str, Option], *, abbreviated: bool) -> str:
    name = written.lstrip("-").replace("_", "-")
    if name in options:
        return name
    begun = [option for option in options if option.startswith(name) and len(option) > 1]
    if abbreviated and written.startswith("--") and len(begun) == 1:
        return begun[0]
    nearest = difflib.get_close_matches(name, options, n=1)
    meant = f"; did you mean --{nearest[0]}?" if nearest else ""
    raise LauncherError(f"has the option {written}, which the launcher does not have{meant}")
