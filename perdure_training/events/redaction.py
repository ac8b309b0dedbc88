"""Replaces secrets in events, before any exporter gets them: exceptions of user code often name tokens and addresses.

It finds the values of the job's secrets, of other environment variables whose names tell a secret, and common forms of
secrets in texts. It cannot find a secret that has no such form: do not put one into an event.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, cast

from perdure_training.events.event import Event
from perdure_training.events.plain import IMMUTABLE
from perdure_training.secret_texts import REDACTED, without_secrets

_SHORTEST = 8
"""Characters of a variable's value: shorter ones are often ordinary words."""
_REMEMBERED = 1024
"""Names of events and attributes whose redaction is remembered: the same few come with each step of a training."""
_LONGEST_NAME = 128
_NAMES = "PERDURE_SECRET_NAMES"
"""Variable with the names of the job's secrets, which the launcher sets."""
_SECRET_VARIABLE = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|_KEY$", re.IGNORECASE)
_SECRET_NAME = re.compile(
    r"token|secret|passw|passphrase|credential|api_?key|access_?key|private_?key|authorization|cookie", re.IGNORECASE
)
"""Wider than the rule for specifications, which warns: a word too many that is replaced in an event costs little."""


class Redaction:
    """Replaces secrets in texts."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """Reads the secrets.

        Args:
            environment: Variables whose values are replaced if they are the job's secrets, or their names tell a
                secret; None for this process's.
        """
        found = os.environ if environment is None else environment
        own = {name: value for name, value in found.items() if name != _NAMES and _SECRET_VARIABLE.search(name)}
        named = [name for name in found.get(_NAMES, "").split(",") if name in found]
        values = {value for value in (*own.values(), *map(found.__getitem__, named)) if len(value) >= _SHORTEST}
        # The longest first: a value may begin with another one.
        words = "|".join(map(re.escape, sorted(values, key=len, reverse=True)))
        self._values = re.compile(words) if words else None
        self._known: dict[str, tuple[str, bool]] = {}

    def event(self, event: Event) -> Event:
        """Returns the event without secrets."""
        (name, _), attributes = self._name(event.name), self._mapping(event.attributes)
        changed = name != event.name or attributes != event.attributes
        return event._replace(name=name, attributes=attributes) if changed else event

    def text(self, text: str) -> str:
        """Returns the text without secrets."""
        if len(text) < _SHORTEST:
            return text
        if self._values is not None:
            text = self._values.sub(REDACTED, text)
        return without_secrets(text)

    def _name(self, name: str) -> tuple[str, bool]:
        """Returns a name without secrets, and whether it indicates that its value is one."""
        known = self._known.get(name)
        if known is None:
            known = self.text(name), _SECRET_NAME.search(name) is not None
            if len(name) <= _LONGEST_NAME and len(self._known) < _REMEMBERED:
                self._known[name] = known
        return known

    def _mapping(self, values: Mapping[str, Any]) -> dict[str, Any]:
        found = dict[str, Any]()
        for name, value in values.items():
            text, is_secret = self._name(name)
            found[text] = REDACTED if is_secret and isinstance(value, str) else self._value(value)
        return found

    def _value(self, value: Any) -> Any:
        if type(value) in IMMUTABLE:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return self._mapping(cast("dict[str, Any]", value))
        if isinstance(value, list):
            return [self._value(item) for item in cast("list[Any]", value)]
        return value
