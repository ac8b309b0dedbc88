"""Finds the words of a command line in a shell's text, so that a part of it can be replaced and the rest kept.

Only words are parsed, not programs: the shell handles the rest of the text as before.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

_BLANK = re.compile(r"(?:[ \t]|\\\n)+")
_COMMENT = re.compile(r"#[^\n]*")
_WORD = re.compile(
    r"""(?: \\. | '[^']*' | "(?:\\.|[^"\\])*" | \$\([^()]*\) | \$\{[^{}]*\} | `[^`]*` | [^\s;&|<>()'"\\`] )+""",
    re.VERBOSE | re.DOTALL,
)
_BUILTINS = frozenset({"cd", "command", "eval", "exec", "export", "set", "source", ".", "time", "ulimit", "unset"})
_LITERAL = re.compile(r"'[^']*'|\\.", re.DOTALL)
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"', re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(?P<plain>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)(?::?-(?P<default>[^{}$`]*))?\})")


@dataclass(frozen=True, kw_only=True)
class Word:
    """One argument of a command line, as a shell splits it."""

    text: str
    """The word without its quotes; variables are not expanded."""
    raw: str
    """The word as it is written."""
    start: int = 0
    end: int = 0
    """The end of the word in the shell's text."""
    expands: bool = False
    """Whether a shell would change it: variables, substitutions, patterns."""


def plain_word(text: str) -> Word:
    """An argument that no shell parses."""
    return Word(text=text, raw=text)


def simple_commands(text: str) -> Iterator[list[Word]]:
    """The commands of a shell's text, each as its words; a text with an open quote ends early."""
    words: list[Word] = []
    position = 0
    while position < len(text):
        if blank := _BLANK.match(text, position):
            position = blank.end()
        elif comment := _COMMENT.match(text, position):
            position = comment.end()
        elif word := _WORD.match(text, position):
            words.append(_read(word))
            position = word.end()
        else:
            if words:
                yield words
            words = []
            position += 1
    if words:
        yield words


def as_words(text: str) -> list[str] | None:
    """The words of a text that needs no shell: one command without variables, patterns or redirections."""
    commands = list(simple_commands(text))
    if len(commands) != 1 or any(word.expands for word in commands[0]):
        return None
    words = commands[0]
    around = text[: words[0].start] + text[words[-1].end :]
    between = (text[one.end : other.start] for one, other in pairwise(words))
    if around.strip() or any(not _BLANK.fullmatch(gap) for gap in between):
        return None
    if "=" in words[0].text or words[0].text in _BUILTINS:
        return None
    return [word.text for word in words]


def fill_variables(text: str, values: Mapping[str, str]) -> str | None:
    """Expands a word's variables; None if one is unknown or a shell would do more than that."""

    def value(match: re.Match[str]) -> str:
        default: str | None = match["default"]
        found = values.get(match["plain"] or match["braced"], default)
        return match[0] if found is None else found

    filled = _VARIABLE.sub(value, text)
    return None if re.search(r"[$`]", filled) else filled


def variables_in(text: str) -> set[str]:
    """The names of the variables that a shell's text reads."""
    return {match["plain"] or match["braced"] for match in _VARIABLE.finditer(text)}


def _read(match: re.Match[str]) -> Word:
    raw = match[0]
    joined = raw.replace("\\\n", "")
    try:
        text = "".join(shlex.split(joined)) if not re.search(r"\$\(|`", joined) else joined
    except ValueError:
        text = joined
    unquoted = _LITERAL.sub("", joined)
    bare = _QUOTED.sub("", unquoted)
    expands = bool(re.search(r"[$`]", unquoted) or re.search(r"[*?\[{~]", bare))
    return Word(text=text, raw=joined, start=match.start(), end=match.end(), expands=expands)
