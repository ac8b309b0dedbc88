"""Numbers of things in texts for people, the same in decisions, commands and on the page."""

from __future__ import annotations

_OF_ONE = {"are": "is", "were": "was"}


def count(number: int, noun: str) -> str:
    """`1 node`, `2,048 nodes`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def do(number: int, verb: str) -> str:
    """The verb of so many things: `are` and `finish` of several, `is` and `finishes` of one."""
    if number != 1:
        return verb
    return _OF_ONE.get(verb) or verb + ("es" if verb.endswith(("s", "sh", "ch", "x")) else "s")


def counted(number: int, noun: str, verb: str) -> str:
    """`1 node finishes`, `2 nodes finish`."""
    return f"{count(number, noun)} {do(number, verb)}"
