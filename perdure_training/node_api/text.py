"""Conversion of texts from user code, which may contain anything."""

from __future__ import annotations


def well_formed(text: str) -> str:
    """Replaces characters that UTF-8 cannot encode by escape sequences, like Python's own tracebacks.

    Bytes that are not valid UTF-8, such as in file names, reach Python as lone surrogates, which JSON parsers may
    reject.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
