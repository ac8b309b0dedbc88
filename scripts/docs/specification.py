"""Generates the reference of the specification, `docs/spec.md`, from its models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from perdure.spec.backends import FIELD_SUPPORT, FieldSupport
from perdure.spec.docstrings import field_docstrings
from perdure.spec.durations import format_duration
from perdure.spec.errors import format_path
from perdure.spec.fields import Location, choices_of, inner_models, is_model, one_of, strip
from perdure.spec.job import Backend, JobSpec
from perdure.spec.roles import NodeCount

_INTRODUCTION = """\
# The job specification

A training job is described in YAML or JSON. A minimal job:

```yaml
# yaml-language-server: $schema=./perdure-job.schema.json
name: hello
roles:
  worker:
    nodes: "2:4"
    command: [torchrun, train.py]
```

`perdure validate job.yaml` checks a file without running it and names every problem at once. `perdure schema >
perdure-job.schema.json` writes the JSON Schema; with the first line above, editors that use the YAML language server
(such as VS Code with Red Hat's YAML extension) complete fields and show what they mean.

How values are written:

- Durations are texts such as `90s`, `10m`, `1h30m`, `2d` or `250ms`, or a number of seconds.
- Files are read by the rules of YAML 1.2: `2:8` and `on` are texts, only `true` and `false` are truth values.
- `${job.name}` and `${job.namespace}` are filled in where a field's description names them. Inside `{…}` YAML wants
  them in quotes: `outputs: {logs: "s3://bucket/${job.name}"}`.
- Numbers and truth values need quotes where a text is expected: `env: {OMP_NUM_THREADS: "4"}`.
- A field without a value is ignored. Unknown fields are errors.
- The size of a specification, as JSON without default values, is [limited](limits.md#jobs-and-nodes).
- A job has at most about 60 roles: each of its groups of nodes is sent the whole specification, in one message.
"""

_OUTRODUCTION = """\
## Fields by backend

{availability}

A backend refuses a field that it does not support if the field would change what runs. It ignores a field without which
the job still does the same, with a warning.

| Field | Backends | Elsewhere |
|-|-|-|
{support}
All other fields mean the same on every backend.

## Starting jobs without Perdure's own commands

The same data as plain JSON is the one argument of the workflow, so any client of Temporal can start a job:

```
temporal workflow start --type TrainingJob --task-queue perdure --workflow-id job/default/hello --input-file job.json
```

On the local default, which reads encrypted payloads only, put [`perdure codec-server --`](encryption.md) before it.

A wrong specification fails the workflow once, with the text that `perdure validate` prints. Relative paths are known
only where Perdure reads the file: plain JSON names `workdir.path` in full. Pods get the folder only from Perdure's own
commands and `perdure.Client`, which upload it.
"""


def reference() -> str:
    """Returns the reference as Markdown."""
    parts = [_INTRODUCTION]
    parts += [_section(model, location) for model, location in _sections(JobSpec, ())]
    names = ", ".join(f"`{backend}`" for backend in sorted(Backend))
    availability = f"This release runs jobs on {names}."
    support = "".join(f"{_support_row(support)}\n" for support in FIELD_SUPPORT)
    parts.append(_OUTRODUCTION.format(availability=availability, support=support))
    return "\n".join(parts)


def _sections(model: type[BaseModel], location: Location) -> Iterator[tuple[type[BaseModel], Location]]:
    yield model, location
    for name, field in model.model_fields.items():
        for inner, step in inner_models(field.annotation):
            yield from _sections(inner, (*location, name, *step))


def _section(model: type[BaseModel], location: Location) -> str:
    heading = "## Fields of the job" if not location else f"### `{format_path(location).replace('[0]', '[]')}`"
    texts = field_docstrings(model)
    rows = "".join(_row(name, field, texts.get(name, ""), location) for name, field in model.model_fields.items())
    return f"{heading}\n\n{_one_line(model.__doc__ or '')}\n\n| Field | Type | Default | Meaning |\n|-|-|-|-|\n{rows}"


def _row(name: str, field: FieldInfo, docstring: str, location: Location) -> str:
    note = next((_note(support) for support in FIELD_SUPPORT if support.pattern == _generic((*location, name))), "")
    meaning = f"{_one_line(docstring)} {note}".strip()
    return f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {_cell(meaning)} |\n"


def _generic(location: Location) -> Location:
    return tuple("*" if part in {0, "<name>"} else part for part in location)


def _note(support: FieldSupport) -> str:
    return f"*Only on {one_of([str(backend) for backend in Backend if backend in support.backends])}.*"


_NAMES: dict[Any, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "truth value",
    datetime: "time",
    timedelta: "duration",
}


def _type(annotation: Any) -> str:
    kind = strip(annotation)
    if choices := choices_of(kind):
        return one_of([f"`{choice}`" for choice in choices])
    if kind is NodeCount:
        return "number, range or mapping"
    if is_model(kind):
        return "mapping"
    if get_origin(kind) is list:
        return f"list of {_type(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return f"mapping of name to {_type(get_args(kind)[1])}"
    if get_origin(kind) is Literal:
        return one_of([f"`{value}`" for value in get_args(kind)])
    members = get_args(kind)
    if int in members:
        return ", ".join(_type(member) for member in members)
    return _NAMES.get(kind, "anything")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.default
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, timedelta):
        return f"`{format_duration(value)}`"
    plain = to_jsonable_python(value)
    return f"`{plain if isinstance(plain, str) else json.dumps(plain)}`"


def _support_row(support: FieldSupport) -> str:
    path = ".".join(str(part) for part in support.pattern).replace("*", "<name>")
    backends = ", ".join(str(backend) for backend in Backend if backend in support.backends)
    return f"| `{path}` | {backends} | {'ignored, with a warning' if support.harmless else 'refused'} |"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
