"""Tests that the tables of bodies in docs/node-protocol.md agree with the bodies that launcher and agent exchange."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields, is_dataclass

from perdure_training.node_api import bodies as module
from perdure_training.node_api.bodies import GETS, POSTS, Body, HandlerHello, HelloAnswer, LauncherHello
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "node-protocol.md").read_text(encoding="utf-8")
GREETINGS = (LauncherHello, HandlerHello)


def bodies() -> list[type[Body]]:
    """All of the protocol, in the order of its module."""
    return [
        one
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, Body) and is_dataclass(one) and one is not Body
    ]


def test_each_request_is_told_with_its_body_and_its_answer():
    posts = [
        f"| `POST {path}` | `{kind.__name__}` | {f'`{HelloAnswer.__name__}`' if kind in GREETINGS else '`{}`'} |"
        for path, kind in POSTS.items()
    ]
    gets = [rf"\| `GET {path}\?[\w&=]+` \| \| `{kind.__name__}` \|" for path, kind in GETS.items()]
    told = [line for line in PAGE.splitlines() if re.match(r"\| `(?:POST|GET) ", line)]
    assert told[: len(posts)] == posts
    assert all(re.fullmatch(row, line) for row, line in zip(gets, told[len(posts) :], strict=True))


def test_each_body_is_told_with_its_fields():
    rows = [
        f"| `{kind.__name__}` | "
        + ", ".join(f"`{field.name}{'' if field.default is MISSING else '?'}`" for field in fields(kind))
        + " |"
        for kind in bodies()
    ]
    names = "|".join(kind.__name__ for kind in bodies())
    assert [line for line in PAGE.splitlines() if re.match(rf"\| `(?:{names})` \|", line)] == rows
