"""Parses the pages of the documentation as Markdown: headings, links, inline code and code blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Block:
    """A fenced or indented block of code."""

    page: str
    line: int
    language: str
    text: str


@dataclass(frozen=True)
class Snippet:
    """Code within a text."""

    page: str
    line: int
    text: str


class Page:
    """One file of Markdown."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.relative_to(ROOT).as_posix()

    @cached_property
    def _tokens(self) -> list[Token]:
        return MarkdownIt("commonmark").enable("table").parse(self.path.read_text(encoding="utf-8"))

    @cached_property
    def anchors(self) -> set[str]:
        """The anchors of the page's headings."""
        pairs = zip(self._tokens, self._tokens[1:], strict=False)
        return {_slug(inline) for opening, inline in pairs if opening.type == "heading_open"}

    @cached_property
    def links(self) -> list[str]:
        """The targets of the page's links and images."""
        return [str(target) for _, token in self._inline() for target in map(token.attrGet, ("href", "src")) if target]

    @cached_property
    def snippets(self) -> list[Snippet]:
        return [
            Snippet(self.name, line, token.content) for line, token in self._inline() if token.type == "code_inline"
        ]

    @cached_property
    def blocks(self) -> list[Block]:
        return [
            Block(self.name, (token.map or [0])[0] + 1, token.info.strip(), token.content)
            for token in self._tokens
            if token.type in ("fence", "code_block")
        ]

    def _inline(self) -> Iterator[tuple[int, Token]]:
        line = 0
        for token in self._tokens:
            line = token.map[0] + 1 if token.map else line
            for child in token.children or ():
                yield line, child


def _slug(heading: Token) -> str:
    text = "".join(child.content for child in heading.children or ())
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


_ELSEWHERE = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md")
PAGES = [Page(path) for path in (*(ROOT / name for name in _ELSEWHERE), *sorted((ROOT / "docs").rglob("*.md")))]
