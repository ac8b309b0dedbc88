"""Recognizes secrets by their names and forms, in variables, commands and texts, and replaces them.

It is the one rule for what looks like a secret: warnings about specifications, texts for people, logs and events use
it. It cannot find a secret that has neither such a name nor such a form.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

REDACTED = "[redacted]"

_SECRET_NAME = re.compile(
    r"(.*_)?(TOKEN|PASSPHRASE|(API|ACCESS|ACCOUNT|AUTH|PRIVATE|SECRET)_?KEY)|.*(PASSWORD|PASSWD|SECRET).*",
    re.IGNORECASE,
)
_SECRET_VARIABLE = re.compile(r"[A-Z0-9_]*_KEY")
"""Among the options of scripts, such a name is usually that of a field of a data set."""
_NAMES_A_PLACE = re.compile(r".*_(FILE|PATH|DIR|ID|NAME|ENV|VAR|STDIN)", re.IGNORECASE)
_OF_A_VOCABULARY = re.compile(
    r"(.*_)?(ADDED|AUDIO|BEGIN|BOS|CLS|DRAFT|END|EOD|EOS|EOT|EXTRA|IMAGE|IMG|MASK|MAX|MIN|NEW|NEWLINE|NUM|PAD|PER|PREFIX|SEP"
    r"|SOT|SPECIAL|START|STOP|SUFFIX|TEXT|THINK|UNK|VIDEO|VISION)_TOKEN",
    re.IGNORECASE,
)
"""Names of the tokens that language models read."""
_NO_SECRET = re.compile(r"\$(?-i:[A-Z_{(]).*|<.*|true|false|yes|no|none|null|0|1|", re.IGNORECASE | re.DOTALL)
"""Values that only refer to a secret, or say whether there is one."""

_QUOTED = r"""(?:"[^"]{0,1024}"|'[^']{0,1024}')"""
_KEYWORD = r"(?:token|secret|passw(?:or)?d|passphrase|credentials?|(?:api|access|account|auth|private|secret)[-_]?key)"
_FORMS = re.compile(
    rf"""
    (?P<address>://)[^/\s:@]*:[^/\s@]+(?=@)
    | (?P<scheme>\b(?:Bearer|Basic)\s+)[A-Za-z0-9+/=._~-]{{8,}}
    | (?P<name>(?:{_KEYWORD}|(?-i:_KEY))["']?\s*[=:]\s*)(?P<value>{_QUOTED}|["']?[^\s"',;&}}]+)
    | (?P<option>(?<![\w-])--?[\w-]{{0,64}}?{_KEYWORD}\s+)(?P<word>{_QUOTED}|[^\s"'-][^\s"',;&}}]*)
    | \b(?:hf_|gh[pousr]_|github_pat_|sk-|glpat-|xox[abprs]-)[A-Za-z0-9_-]{{16,}}
    | \bA(?:KI|SI)A[A-Z0-9]{{16}}\b
    | \beyJ[A-Za-z0-9_-]{{8,512}}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----.*?(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z)
    """,
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
_IN_NAMES = f"{string.ascii_letters}{string.digits}_-"
_LONGEST_NAME = 64
_ASSIGNMENT = re.compile(r"(?P<name>[-+]*[A-Za-z_][\w.-]*)=(?P<value>.*)", re.DOTALL)
_SCRIPT_FOLLOWS = frozenset({"-c", "-lc", "-ec"})
"""Options of shells and Python before a word that is a whole script."""


def is_secret(name: str, value: str) -> bool:
    """Returns whether the value of a variable, an option or a setting looks like a secret, by its name or its form."""
    return (_is_secret_name(name) and not _NO_SECRET.fullmatch(value)) or without_secrets(value) != value


def without_secrets(text: str) -> str:
    """Returns the text with its secrets replaced."""
    return _FORMS.sub(_keep_context, text)


def command_without_secrets(command: Sequence[str]) -> list[str]:
    """Returns the words of a command with their secrets replaced."""
    words = list(command)
    for found in secrets_in(command):
        words[found.index] = found.shown
    return words


@dataclass(frozen=True)
class SecretWord:
    """A word of a command that is, or contains, what looks like a secret."""

    index: int
    name: str
    """The option or variable whose value it is; empty where its form shows it."""
    shown: str
    """The word with its secrets replaced."""


def secrets_in(command: Sequence[str]) -> Iterator[SecretWord]:
    """Yields the words of a command that look like secrets."""
    before = ""
    for index, word in enumerate(command):
        assigned = None if before in _SCRIPT_FOLLOWS else _ASSIGNMENT.fullmatch(word)
        if before.startswith("-") and "=" not in before and not word.startswith("-") and _names(before, word):
            yield SecretWord(index, before, REDACTED)
        elif assigned and _names(assigned["name"], assigned["value"]):
            yield SecretWord(index, assigned["name"], f"{assigned['name']}={REDACTED}")
        elif (shown := without_secrets(word)) != word:
            yield SecretWord(index, "", shown)
        before = word


def _keep_context(match: re.Match[str]) -> str:
    """Returns the replacement of what has the form of a secret."""
    name, value = match["name"] or match["option"] or "", match["value"] or match["word"] or ""
    if name:
        before = match.string[max(match.start() - _LONGEST_NAME, 0) : match.start()]
        plain = _plain(before[len(before.rstrip(_IN_NAMES)) :] + name.rstrip("\"'=: \t\r\n"))
        if _is_no_secret_name(plain) or _NO_SECRET.fullmatch(value.strip("\"'")):
            return match[0]
    quote = value[:1] if value[:1] in ("'", '"') else ""
    ending = quote if value[1:].endswith(quote) else ""
    return f"{match['address'] or match['scheme'] or name}{quote}{REDACTED}{ending}"


def _names(name: str, value: str) -> bool:
    return _is_secret_name(name) and not _NO_SECRET.fullmatch(value)


def _is_secret_name(name: str) -> bool:
    plain = _plain(name)
    is_one = _SECRET_NAME.fullmatch(plain) or _SECRET_VARIABLE.fullmatch(plain)
    return is_one is not None and not _is_no_secret_name(plain)


def _is_no_secret_name(plain: str) -> bool:
    return bool(_NAMES_A_PLACE.fullmatch(plain) or _OF_A_VOCABULARY.fullmatch(plain))


def _plain(name: str) -> str:
    return name.lstrip("-+").replace("-", "_").replace(".", "_")
