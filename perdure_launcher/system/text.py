"""Texts of user code, which may hold anything."""

from __future__ import annotations


def well_formed(text: str) -> str:
    """The text with what UTF-8 cannot encode written as an escape sequence, as Python's own tracebacks show it.

    Bytes that are no UTF-8, such as in file names, reach Python as lone surrogates, which no JSON parser has to accept.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
