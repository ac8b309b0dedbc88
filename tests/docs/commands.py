"""Extracts the commands that README and docs print, as a shell would run them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

from tests.docs.pages import PAGES, Block

ENDS = {"|", "||", "&&", "&", ";", "(", ")"}
KEYWORDS = {"do", "then", "else"}
STRUCTURE = {"for", "done", "until", "while", "if", "fi"}
"""Words of the shell that begin no command."""

VERBATIM = {"perdure", "make", "kubectl", "helm", "temporal", "docker", "curl", "srun", "pytest", "python"}
"""First words of inline code that make it a command; in code blocks everything is one."""


@dataclass(frozen=True)
class Command:
    """One program and its arguments."""

    page: str
    line: int
    words: tuple[str, ...]
    settings: tuple[str, ...] = ()
    """Variables that are set for it, as NAME=VALUE."""
    whole: bool = True
    """Whether the text is a complete command; inline code may contain only a part of one."""

    @property
    def program(self) -> str:
        return self.words[0].rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


def simple_commands(text: str) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The settings and words of each command of a line of shell, without redirections."""
    lexer = shlex.shlex(re.sub(r"<(\w+)>", "NAME", text), posix=True, punctuation_chars="|&;<>()")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words: list[str] = []
    redirected = False
    for token in [*lexer, ";"]:
        if token in ENDS:
            while words and words[0] in KEYWORDS:
                words.pop(0)
            settings = tuple(takewhile(lambda word: re.match(r"[A-Z_]+=", word), words))
            rest = tuple(words[len(settings) :])
            if rest and rest[0] not in STRUCTURE:
                yield settings, rest
            words = []
        elif token.strip("<>") == "":
            redirected = True
        elif redirected:
            redirected = False
        else:
            words.append(token)


def typed_lines(block: Block) -> Iterator[tuple[int, str]]:
    """The lines that a block wants typed: after a prompt, or all of a listing of commands."""
    joined = re.sub(r"\\\n\s*", " ", block.text)
    for number, line in enumerate(joined.splitlines(), block.line):
        if block.language == "console":
            if line.startswith("$ "):
                yield number, line.removeprefix("$ ")
        elif block.language == "" and re.match(r"(\.venv/bin/)?(\w+)\b", line.strip()):
            first = line.split()[0].rpartition("/")[2]
            if first in VERBATIM:
                yield number, line.strip()


def all_commands() -> Iterator[Command]:
    """Each command; one that another one starts, as srun and `perdure temporal` do, counts, too."""
    for command in printed_commands():
        yield command
        if command.program == "srun" and "perdure" in command.words:
            yield replace(command, words=command.words[command.words.index("perdure") :])
        if command.words[:2] == ("perdure", "temporal") and len(command.words) > 2:
            yield replace(command, words=command.words[1:])


def printed_commands() -> Iterator[Command]:
    for page in PAGES:
        for block in page.blocks:
            for line, text in typed_lines(block):
                for settings, words in simple_commands(text):
                    yield Command(page.name, line, words, settings)
        for snippet in page.snippets:
            if not re.match(rf"([A-Z_]+=('[^']*'|\"[^\"]*\"|\S+) )?({'|'.join(VERBATIM)}) ", snippet.text):
                continue
            for settings, words in simple_commands(snippet.text):
                yield Command(page.name, snippet.line, words, settings, whole=False)


COMMANDS = tuple(all_commands())
