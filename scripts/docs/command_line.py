"""Generates the reference of the command line, `docs/cli.md`, from the typer application."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.text import Text
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from perdure.cli.main import app

_INTRODUCTION = """\
# The command line

Every command and option of `perdure`, as `perdure COMMAND --help` shows them. `temporal perdure …` is the same as an
extension of Temporal's command line.

- `-o json` prints JSON for scripts. It may stand before the command, as may Temporal's own global options.
- Errors go to standard error, with what to do about them.
- Exit codes: 0 ok, 1 the script failed, 2 usage or specification, 3 infrastructure, 4 cancelled, 5 deadline, 6 control
  plane unreachable, 130 detached by Ctrl-C.

"""


def reference() -> str:
    """Returns the reference as Markdown."""
    root = get_command(app)
    assert isinstance(root, TyperGroup)
    context = root.make_context("perdure", ["--help"], resilient_parsing=True)
    commands = [command for name in root.list_commands(context) if (command := root.get_command(context, name))]
    visible = [command for command in commands if isinstance(command, TyperCommand) and not command.hidden]
    overview: list[str] = []
    sections: list[str] = []
    for panel, members in groupby(visible, key=lambda command: command.rich_help_panel):
        sections.append(f"## {panel}\n")
        for command in members:
            overview.append(f"| [`{command.name}`](#perdure-{command.name}) | {_first_sentence(command.help or '')} |")
            sections.append(_section(command, root))
    table = "\n".join(["| command | what it does |", "|-|-|", *overview])
    return f"{_INTRODUCTION}{table}\n\n" + "\n".join(sections)


def _section(command: TyperCommand, root: TyperGroup) -> str:
    parent = root.make_context("perdure", ["--help"], resilient_parsing=True)
    context = command.make_context(command.name, [], parent=parent, resilient_parsing=True)
    usage = " ".join(["perdure", command.name or "", *_words(command)])
    parts = [f"### `perdure {command.name}`\n", f"```text\n{usage}\n```\n"]
    parts += [f"{paragraph}\n" for paragraph in _paragraphs(command.help or "")]
    arguments = [parameter for parameter in command.params if isinstance(parameter, TyperArgument)]
    if arguments:
        rows = [f"| `{_cell(argument.metavar or '')}` | {_meaning(argument)} |" for argument in arguments]
        parts.append("\n".join(["| argument | meaning |", "|-|-|", *rows]) + "\n")
    options = [parameter for parameter in command.params if isinstance(parameter, TyperOption) and not parameter.hidden]
    if options:
        rows = [f"| {_names(option, context)} | {_default(option)} | {_meaning(option)} |" for option in options]
        parts.append("\n".join(["| option | default | meaning |", "|-|-|-|", *rows]) + "\n")
    return "\n".join(parts)


def _names(option: TyperOption, context: Any) -> str:
    names, _ = option.get_help_record(context) or ("", "")
    return f"`{_cell(names)}`"


def _words(command: TyperCommand) -> Iterator[str]:
    yield command.options_metavar or ""
    for parameter in command.params:
        if isinstance(parameter, TyperArgument):
            yield parameter.metavar or ""


def _paragraphs(text: str) -> Iterator[str]:
    """Yields paragraphs as Markdown. Dim text is input that users type: a paragraph of nothing else is an example,
    other dim text is inline code."""
    for paragraph in text.strip().split("\n\n"):
        marked = Text.from_markup(paragraph)
        typed = [span for span in marked.spans if span.style == "dim"]
        rest = list(marked.plain)
        for span in typed:
            rest[span.start : span.end] = " " * (span.end - span.start)
        if typed and not "".join(rest).strip():
            examples = [line for span in typed for line in marked.plain[span.start : span.end].split(" · ")]
            yield "\n".join(["```console", *(f"$ {example}" for example in examples), "```"])
            continue
        plain = marked.plain
        for span in reversed(typed):
            plain = f"{plain[: span.start]}`{plain[span.start : span.end]}`{plain[span.end :]}"
        yield plain


def _first_sentence(text: str) -> str:
    paragraph = next(_paragraphs(text))
    return _cell(" ".join(paragraph.split()))


def _default(option: TyperOption) -> str:
    if isinstance(option.show_default, str):
        return option.show_default
    if option.is_flag or option.default in (None, "") or not option.show_default:
        return ""
    return f"`{option.default}`"


def _meaning(parameter: TyperOption | TyperArgument) -> str:
    text = " ".join((parameter.help or "").split())
    variable = f" Variable: `{parameter.envvar}`." if parameter.envvar else ""
    return _cell(text) + variable


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
