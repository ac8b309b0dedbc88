"""Tells texts from other bytes among environment variables.

A shell passes on any bytes; JSON and Temporal's SDK hold only texts.
"""

from __future__ import annotations

import os


def text_variables() -> dict[str, str]:
    """Returns this process's variables that are texts, for Temporal's SDK to read its configuration from: its core
    panics where any variable has bytes that are no UTF-8."""
    return {name: value for name, value in os.environ.items() if is_text(name) and is_text(value)}


def is_text(text: str) -> bool:
    """Returns whether a text has no characters that stand for bytes which are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
