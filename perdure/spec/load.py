"""Reads specifications from files, with the lines for error messages, and with YAML values as they were written.

YAML 1.1, which PyYAML follows, reads `nodes: 2:8` as 128, `on` as true and `1e-4` as a text. Specifications are read by
the rules of YAML 1.2 instead, under which these values mean what they look like.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from yaml.constructor import ConstructorError

from .backends import SpecWarning
from .capabilities import BESIDE_WORKER
from .errors import Line, SpecError, SpecProblem
from .fields import Location
from .job import Backend, JobSpec
from .script_use import find_lost_states
from .validate import parse_spec, validate_spec

MAX_FILE_BYTES = 1024 * 1024
MAX_VALUES = 20_000


@dataclass(frozen=True, kw_only=True)
class SpecDocument:
    """A specification as it was written."""

    data: Any
    """Mappings, lists and scalars."""
    lines: dict[Location, int]
    """The line, counted from 1, of each key or item."""
    folder: Path | None
    """The folder of the file; None for a text."""

    def with_overrides(self, overrides: Mapping[str, Any]) -> SpecDocument:
        """Returns the same document, with some top-level fields replaced by the command line's or the site's."""
        if (data := _mapping(self.data)) is None:
            return self
        lines = {place: line for place, line in self.lines.items() if not place or place[0] not in overrides}
        return SpecDocument(data={**data, **overrides}, lines=lines, folder=self.folder)

    def with_workdir(self) -> SpecDocument:
        """Returns the same document, with the local backend's working directory made absolute; the default is the
        file's own folder."""
        if self.folder is None or (data := _mapping(self.data)) is None:
            return self
        workdir = _mapping(data.get("workdir"))
        if data.get("workdir") is None and (data.get("backend") or Backend.LOCAL) in BESIDE_WORKER:
            workdir = {"path": "."}
        if workdir is None or not isinstance(path := workdir.get("path"), str):
            return self
        absolute = str((self.folder / Path(path).expanduser()).resolve())
        return SpecDocument(
            data={**data, "workdir": {**workdir, "path": absolute}}, lines=self.lines, folder=self.folder
        )


def _mapping(value: Any) -> dict[Any, Any] | None:
    return cast("dict[Any, Any]", value) if isinstance(value, dict) else None


def load_spec(source: str | Path, *, overrides: Mapping[str, Any] | None = None) -> JobSpec:
    """Reads a specification from a file or a text, in YAML or JSON, without checking backends.

    Args:
        source: A path, or a text (several lines, or JSON).
        overrides: Top-level fields that replace the file's, such as `{"backend": "local"}`.

    Raises:
        SpecError: with all errors, and their lines.
        OSError: if the file cannot be read.
    """
    with _in_file(source):
        document = read_document(source).with_overrides(overrides or {}).with_workdir()
        try:
            return parse_spec(document.data)
        except SpecError as error:
            raise error.with_lines(document.lines) from None


def validate_file(
    source: str | Path, *, overrides: Mapping[str, Any] | None = None
) -> tuple[JobSpec, tuple[SpecWarning, ...]]:
    """Reads a specification as `load_spec` does, and checks that this release can run it on its backend.

    Raises:
        SpecError: with all errors, and their lines.
        OSError: if the file cannot be read.
    """
    with _in_file(source):
        document = read_document(source).with_overrides(overrides or {}).with_workdir()
        try:
            spec, warnings = validate_spec(document.data)
            warnings = (*warnings, *find_lost_states(spec))
        except SpecError as error:
            raise error.with_lines(document.lines) from None
    return spec, tuple(warning.with_line(document.lines) for warning in warnings)


@contextmanager
def _in_file(source: str | Path) -> Generator[None]:
    """Adds the file's name to errors in it."""
    try:
        yield
    except SpecError as error:
        raise error if _is_text(source) else error.in_file(str(source)) from None


def read_document(source: str | Path) -> SpecDocument:
    """Reads YAML or JSON as plain data, with the line of each value.

    Raises:
        SpecError: if the text is neither.
        OSError: if the file cannot be read.
    """
    text, folder = read_text(source)
    with _syntax_of(text):
        data, lines = _read_json(text) if text.lstrip().startswith("{") else _read_yaml(text)
    return SpecDocument(data=data, lines=lines, folder=folder)


def read_documents(source: str | Path) -> list[SpecDocument]:
    """Reads all documents of a YAML file, separated by `---`, without empty ones; a JSON file is one document.

    Raises:
        SpecError: if the text is neither.
        OSError: if the file cannot be read.
    """
    text, folder = read_text(source)
    with _syntax_of(text):
        found = [_read_json(text)] if text.lstrip().startswith("{") else list(_yaml_documents(text))
    return [SpecDocument(data=data, lines=lines, folder=folder) for data, lines in found if data is not None]


def read_text(source: str | Path) -> tuple[str, Path | None]:
    """Reads a file's text.

    Returns:
        The text, and the folder of its file if it is in one.

    Raises:
        SpecError: if it is too large, or no text in UTF-8.
        OSError: if the file cannot be read.
    """
    if _is_text(source):
        return str(source), None
    path = Path(source)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SpecError([SpecProblem(location=(str(path),), expected="a text in UTF-8")]) from None
    if len(content) > MAX_FILE_BYTES:
        raise SpecError([SpecProblem(location=(str(path),), expected=f"at most {MAX_FILE_BYTES} bytes")])
    return text, path.absolute().parent


def _is_text(source: str | Path) -> bool:
    return isinstance(source, str) and ("\n" in source or source.lstrip().startswith("{"))


@contextmanager
def _syntax_of(text: str) -> Generator[None]:
    """Turns YAML's errors into errors of this module."""
    try:
        yield
    except yaml.YAMLError as error:
        raise SpecError([_syntax_problem(error, text)]) from None
    except RecursionError:
        raise SpecError([SpecProblem(location=(), message="nested too deep")]) from None


def _read_json(text: str) -> tuple[Any, dict[Location, int]]:
    """Reads JSON; if that fails, YAML that begins with a brace.

    Raises:
        SpecError: if it is neither, and was meant to be JSON: its first key is in quotes.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        # A number of thousands of digits is JSON, and none that Python reads.
        try:
            return _read_yaml(text)
        except yaml.YAMLError:
            if not isinstance(error, json.JSONDecodeError) or not re.match(r'\s*\{\s*"', text):
                raise
            raise SpecError([_json_problem(error, text)]) from None
    # YAML also finds lines and duplicate keys in JSON once tabs are removed, which JSON allows between tokens only.
    return data, _read_yaml(text.replace("\t", " "))[1]


def _read_yaml(text: str) -> tuple[Any, dict[Location, int]]:
    loader: Any = _Loader(text)  # PyYAML's type stubs are partial.
    lines: dict[Location, int] = {}
    try:
        node = loader.get_single_node()
        if node is None:
            return None, lines
        _find_lines(node, (), lines)
        return loader.construct_document(node), lines
    finally:
        loader.dispose()


def _yaml_documents(text: str) -> Iterator[tuple[Any, dict[Location, int]]]:
    loader: Any = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            lines: dict[Location, int] = {}
            _find_lines(node, (), lines)
            yield loader.construct_document(node), lines
    finally:
        loader.dispose()


def _find_lines(node: yaml.Node, location: Location, lines: dict[Location, int]) -> None:
    if len(lines) > MAX_VALUES:
        raise ConstructorError(None, None, f"more than {MAX_VALUES} values, counting aliases", node.start_mark)
    line = lines.setdefault(location, node.start_mark.line + 1)
    if isinstance(node, yaml.ScalarNode) and not node.tag.endswith(":str"):
        lines[location] = Line(line, str(node.value))
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            place = (*location, str(key.value))
            lines[place] = key.start_mark.line + 1
            _find_lines(value, place, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _find_lines(value, (*location, index), lines)


@contextmanager
def _value_at(node: yaml.Node) -> Generator[None]:
    """Names the place of a value that does not fit the tag that the file gives it, such as `!!float x`: PyYAML raises
    whatever its conversion did."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        message = f"the value does not fit its tag {node.tag.replace('tag:yaml.org,2002:', '!!')}: {error}"
        raise ConstructorError(None, None, message, node.start_mark) from None


class _Loader(yaml.SafeLoader):
    """YAML with the scalars of version 1.2, and without duplicate keys."""

    def construct_document(self, node: yaml.Node) -> Any:
        with _value_at(node):
            return cast("Any", super()).construct_document(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        with _value_at(node):
            return cast("Any", super()).construct_object(node, deep=deep)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge" or not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in first:
                line = first[key.value].start_mark.line + 1
                raise ConstructorError(None, None, f'the key "{key.value}" is already on line {line}', key.start_mark)
            first[key.value] = key
        return cast("dict[Any, Any]", super().construct_mapping(node, deep=deep))

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        text = str(node.value)
        try:
            return int(text, 0) if re.match(r"0[ox]", text) else int(text)
        except ValueError as error:
            raise ConstructorError(None, None, str(error), node.start_mark) from None


def use_scalars_of_yaml_1_2(resolver: Any) -> None:
    """Has a loader or dumper of PyYAML recognize the scalars of YAML 1.2, besides those that it knows."""
    for tag, pattern, first in _SCALARS:
        resolver.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), first)


_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
)
"""Tag, pattern, and the characters that a scalar of this kind may begin with."""

_Loader.yaml_implicit_resolvers = {}
use_scalars_of_yaml_1_2(_Loader)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)


def _json_problem(error: json.JSONDecodeError, text: str) -> SpecProblem:
    row = "".join(text.splitlines()[error.lineno - 1 : error.lineno]).strip()
    place = f"line {error.lineno}, column {error.colno}"
    hint = f"there: {row}" if row else ""
    return SpecProblem(location=(), message=f"not valid JSON at {place}: {error.msg}", hint=hint, line=error.lineno)


def _syntax_problem(error: yaml.YAMLError, text: str) -> SpecProblem:
    if not isinstance(error, yaml.MarkedYAMLError) or (mark := error.problem_mark or error.context_mark) is None:
        return SpecProblem(location=(), message=f"not valid YAML: {error}")
    rows = text.splitlines()
    # A mark may point behind the last line.
    row, begin = ("".join(rows[m.line : m.line + 1]).strip() for m in (mark, error.context_mark or mark))
    problem = error.problem or error.context or "cannot be read"
    hint = f"there: {row}" if row else ""
    if any(re.search(r"""\{[^"'#]*\$\{""", part) for part in (row, begin)):
        hint = 'inside {…}, put a text with ${…} in quotes, such as {logs: "s3://bucket/${job.name}"}'
    elif "'\\t'" in problem:
        hint = "indent with spaces"
    return SpecProblem(
        location=(),
        message=f"not valid YAML at line {mark.line + 1}, column {mark.column + 1}: {problem}",
        hint=hint,
        line=mark.line + 1,
    )
