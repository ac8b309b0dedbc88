"""Generates the reference of the Python API, `docs/python-api.md`, from public signatures and docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import dedent

from griffe import (
    Alias,
    Attribute,
    Class,
    DocstringSectionKind,
    Expr,
    ExprCall,
    ExprName,
    ExprSubscript,
    ExprTuple,
    Function,
    GriffeLoader,
    Module,
    ModuleFinder,
    Object,
    Parser,
)

_INTRODUCTION = """\
# The Python API

The public API: the names in `perdure`, those of results and errors among them, and `perdure_training` for training
scripts, which needs the standard library only. Everything else is internal and changes without notice.
"""

_RETURNED = """\
## Return types

Frozen pydantic models. `model_dump(mode="json")` is what `-o json` prints.
"""

_ERRORS = """\
## Errors

The exceptions that calls raise, such as `perdure.JobNotFound`. Each is a `perdure.PerdureError` and has a `remedy`, a
text for users, and an `exit_code`, with which `perdure` exits.
"""

_EXPLAINED_ELSEWHERE = {"JobSpec": "Its fields are in [spec.md](spec.md)."}

_WITH_CALLS = ("Client", "JobSpec", "SpecError", "SyncClient", "load_spec", "parse_spec")
"""The public names whose calls return what the reference lists as results."""

_MODULES = ("perdure", "perdure_training", "perdure.base.errors")

_LINE = 100
"""Maximum length of a signature on one line."""

_PACKAGES = ("perdure", "perdure_training")
"""Packages that define public names and the types that calls return."""

_INTERNAL = frozenset(
    ("activities", "agent", "cli", "gateway", "join", "local", "operator", "page", "worker", "workflows")
)
"""Parts of `perdure` that define no public names. They are most of it, and are not parsed."""

_BASE = "perdure.contract.base.Message"
"""The base of all results: what it has is used by Perdure itself."""


class _Finder(ModuleFinder):
    """Finds the modules that can define public names."""

    def submodules(self, module: Module) -> list[tuple[tuple[str, ...], Path]]:
        """Returns the names and files of a package's modules."""
        return [found for found in super().submodules(module) if found[0][0] not in _INTERNAL]


def reference() -> str:
    """Returns the reference as Markdown."""
    loader = GriffeLoader(docstring_parser=Parser.google)
    loader.finder = _Finder()
    for package in _PACKAGES:
        loader.load(package)
    perdure, training, errors = (loader.modules_collection[path] for path in _MODULES)
    exported, trainings, raised = _exports(perdure), _exports(training), _classes(errors)
    calls = [thing for thing in exported if thing.name in _WITH_CALLS]
    returned = [thing for thing in _returned_classes(calls, loader) if thing not in calls]
    public = [thing for thing in exported if thing not in returned and thing not in raised]
    if hidden := {thing.name for thing in (*returned, *raised)} - {thing.name for thing in exported}:
        raise ValueError(f"perdure does not export {sorted(hidden)}, which its calls return or raise")
    parts = [_INTRODUCTION, _prose(perdure)]
    parts += [_section(thing, "##", loader, "perdure.") for thing in public]
    parts += [f"## `perdure_training`\n\n{_prose(training)}"]
    parts += [_section(thing, "###", loader, "perdure_training.") for thing in trainings]
    parts += [_RETURNED, *(_section(thing, "###", loader, "perdure.") for thing in returned)]
    parts += [_ERRORS, _errors(raised)]
    parts += [_section(thing, "###", loader, "perdure.") for thing in raised if not _is_error(thing)]
    return "\n".join(parts)


def _exports(module: Module | Alias) -> list[Object]:
    return [_target(module[str(name)]) for name in module.exports or ()]


def _classes(module: Module | Alias) -> list[Class]:
    return [thing for thing in module.classes.values() if isinstance(thing, Class)]


def _target(thing: Object | Alias) -> Object:
    return thing.final_target if isinstance(thing, Alias) else thing


def _find(path: str, loader: GriffeLoader) -> Object | None:
    """Returns the object with this path; None if it belongs to another package."""
    return _target(loader.modules_collection[path]) if path.partition(".")[0] in _PACKAGES else None


def _returned_classes(things: Iterable[Object], loader: GriffeLoader) -> list[Class]:
    """Returns the classes that functions and methods return, and those of their fields, by name; also those that a
    union with a name of its own consists of."""
    found: dict[str, Class] = {}
    left = [
        function.returns for thing in things for function in (thing, *_methods(thing)) if isinstance(function, Function)
    ]
    while left:
        for name in _names(left.pop()):
            named = _find(name.canonical_path, loader)
            if isinstance(named, Attribute):
                left.append(_aliased(named))
            if isinstance(named, Class) and named.path not in found and named.name not in _EXPLAINED_ELSEWHERE:
                found[named.path] = named
                left += [value.annotation for value in _values(named)]
    return sorted(found.values(), key=lambda thing: thing.name)


def _names(annotation: Expr | str | None) -> Iterator[ExprName]:
    if isinstance(annotation, Expr):
        yield from (name for name in annotation.iterate(flat=True) if isinstance(name, ExprName))


def _members(thing: Object) -> Iterator[Object]:
    """Yields the public members of a class, inherited ones first; nothing for other objects."""
    if isinstance(thing, Class):
        for name, member in {**thing.inherited_members, **thing.members}.items():
            found = _target(member)
            if not name.startswith("_") and name != "model_config" and not found.path.startswith(f"{_BASE}."):
                yield found


def _methods(thing: Object) -> list[Function]:
    return [member for member in _members(thing) if isinstance(member, Function)]


def _values(thing: Object) -> list[Attribute]:
    return [member for member in _members(thing) if isinstance(member, Attribute) and not _mirror(member)]


def _mirror(member: Object) -> ExprCall | None:
    """Returns the call that makes a method of another class's, as those of SyncClient are made."""
    value = member.value if isinstance(member, Attribute) else None
    return value if isinstance(value, ExprCall) and str(value.function) in ("_blocking", "_iterating") else None


def _mirrored_signature(call: ExprCall, loader: GriffeLoader) -> str:
    (argument,) = call.arguments
    assert isinstance(argument, Expr)
    method = _find(argument.canonical_path, loader)
    assert isinstance(method, Function)
    return _signature(method).removeprefix("async ").replace("AsyncGenerator", "Iterator")


def _section(thing: Object, heading: str, loader: GriffeLoader, prefix: str = "") -> str:
    parts = [f"{heading} `{prefix}{thing.name}`\n"]
    if isinstance(thing, Function):
        return "\n".join([*parts, _code([_signature(thing)]), _prose(thing)])
    initializer = _initializer(thing)
    if initializer:
        parts.append(_code([_signature(initializer, thing.name)]))
    parts.append(_prose(thing))
    if note := _EXPLAINED_ELSEWHERE.get(thing.name):
        return "\n".join([*parts, f"{note}\n"])
    if initializer:
        parts.append(_prose(initializer, skip=1))
    parts.append(_table(thing, loader))
    for method in _methods(thing):
        parts += [f"{heading}# `{thing.name}.{method.name}`\n", _code([_signature(method)]), _prose(method)]
    if mirrored := [_mirrored_signature(call, loader) for member in _members(thing) if (call := _mirror(member))]:
        parts.append(_code(mirrored))
    return "\n".join(part for part in parts if part)


def _initializer(thing: Object) -> Function | None:
    """Returns what a class is created with: its own, or that of a base class."""
    found = _target(thing.all_members["__init__"]) if "__init__" in thing.all_members else None
    return found if isinstance(found, Function) else None


def _code(lines: Sequence[str]) -> str:
    return "\n".join(["```python", *lines, "```\n"])


def _signature(function: Function, name: str | None = None) -> str:
    """Returns the signature as it is called: without `self`, and with one argument per line if it is long."""
    text = re.sub(r"\(self(, )?", "(", str(function.signature(name=name)).replace("'", '"'))
    # A class with a method `list` names the type so.
    text = text.removesuffix(" -> None").replace("builtins.", "")
    if len(text) > _LINE:
        arguments, _, returned = text.partition("(")[2].rpartition(")")
        lines = re.split(r", (?=\*|\w+: )", arguments)
        text = "\n".join([f"{text.partition('(')[0]}(", *(f"    {line}," for line in lines), f"){returned}"])
    return f"async {text}" if "async" in function.labels else text


def _table(thing: Object, loader: GriffeLoader) -> str:
    """Returns a table of an enumeration's members or a model's fields; for other classes, of the documented
    attributes."""
    values = _values(thing)
    if not any(value.annotation for value in values):
        rows = [f"| {_member(value)} | {_summary(value)} |" for value in values if value.value]
        return "\n".join(["| member | meaning |", "|-|-|", *rows]) + "\n" if rows else ""
    told = values if thing.docstring is None or not _initializer(thing) else [v for v in values if v.docstring]
    rows = [f"| `{value.name}` | {_type(value.annotation, loader)} | {_summary(value)} |" for value in told]
    return "\n".join(["| field | type | meaning |", "|-|-|-|", *rows]) + "\n" if rows else ""


def _member(value: Attribute) -> str:
    return f"`{value.name}`" + (f" = {value.value}" if str(value.value).isdigit() else "")


def _type(annotation: Expr | str | None, loader: GriffeLoader) -> str:
    """Returns an annotation as Markdown: of `Annotated[…]`, also behind a name, only the type."""
    annotation = _annotated(annotation)
    text = str(annotation)
    for name in _names(annotation):
        alias = _find(name.canonical_path, loader)
        if isinstance(alias, Attribute) and isinstance(alias.value, ExprSubscript):
            text = re.sub(rf"\b{name.name}\b", str(_aliased(alias)), text)
    return f"`{_cell(text)}`"


def _aliased(alias: Attribute) -> Expr | str | None:
    """Returns the type that a name stands for."""
    return _annotated(alias.value)


def _annotated(expression: Expr | str | None) -> Expr | str | None:
    """Returns only the type of an `Annotated[…]`, and other types as they are."""
    if not isinstance(expression, ExprSubscript) or str(expression.left) != "Annotated":
        return expression
    return expression.slice.elements[0] if isinstance(expression.slice, ExprTuple) else expression.slice


def _errors(classes: Iterable[Class]) -> str:
    rows = [
        f"| `{error.name}` | {', '.join(f'`{base}`' for base in error.bases)} | {_summary(error)} |"
        for error in classes
        if _is_error(error)
    ]
    return "\n".join(["| error | is a | meaning |", "|-|-|-|", *rows]) + "\n"


def _is_error(thing: Class) -> bool:
    return "exit_code" in thing.all_members


def _summary(thing: Object) -> str:
    return _cell(thing.docstring.value) if thing.docstring else ""


def _prose(thing: Object | Alias, *, skip: int = 0) -> str:
    """Returns the docstring as Markdown, without its first `skip` paragraphs."""
    parts: list[str] = []
    for section in thing.docstring.parsed if thing.docstring else ():
        match section.kind:
            case DocstringSectionKind.text:
                parts += [_paragraph(text) for text in re.split(r"\n\n(?! )", section.value)][skip:]
            case DocstringSectionKind.parameters:
                parts.append(_definitions("argument", [(value.name, value.description) for value in section.value]))
            case DocstringSectionKind.raises:
                parts.append(
                    _definitions("raises", [(str(value.annotation), value.description) for value in section.value])
                )
            case kind:
                raise NotImplementedError(f"{thing.path}: a docstring's section of {kind.value}")
    return "\n\n".join(part for part in parts if part) + "\n" if parts else ""


def _definitions(what: str, things: Iterable[tuple[str, str]]) -> str:
    return "\n".join([f"| {what} | |", "|-|-|", *(f"| `{name}` | {_cell(text)} |" for name, text in things)])


def _paragraph(text: str) -> str:
    """Returns a paragraph of prose as Markdown, with the indented example that follows it."""
    prose, _, example = text.partition("\n\n    ")
    if text.startswith("    "):
        prose, example = "", text.removeprefix("    ")
    code = "```python\n" + dedent(f"    {example}") + "\n```" if example else ""
    return "\n\n".join(part for part in (prose, code) if part)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
