"""Types that all parts of the job specification share: the strict base model, and texts with a required form.

A specification is accepted or rejected as a whole. An unknown field is an error, because a misspelled `max_restart`
that is ignored costs a night of training.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from .object_references import NamedKind, Names

MOST_RULES = 32
"""The most rules of one job, `retry.rules`."""


class Section(BaseModel):
    """A part of the specification: immutable and strict about its fields, which docstrings describe everywhere."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    written_as: ClassVar[str] = "a mapping"
    """The form in which people write this section, for error messages."""

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_default(cls, data: Any) -> Any:
        """Treats a field without a value, which YAML leaves when its content is commented out, as a missing field."""
        if not isinstance(data, dict):
            return data
        fields = cast("dict[str, Any]", data)
        return {name: value for name, value in fields.items() if value is not None or name not in cls.model_fields}


@dataclass(frozen=True, kw_only=True)
class Matching:
    """Restricts a text to a pattern, with a description of the pattern for error messages."""

    pattern: str
    expected: str
    max_length: int | None = None

    def check(self, text: str) -> str:
        """Returns the text.

        Raises:
            ValueError: if it does not match.
        """
        if not re.fullmatch(self.pattern, text) or (self.max_length and len(text) > self.max_length):
            raise ValueError(f"expected {self.expected}")
        return text

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        json_schema = {**handler(schema), "pattern": f"^{self.pattern}$"}
        return json_schema | ({"maxLength": self.max_length} if self.max_length else {})


_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"

JobName = Annotated[
    str,
    Matching(
        pattern=_LABEL,
        expected="at most 63 lowercase letters, digits and inner hyphens",
        max_length=63,
    ),
]
"""A DNS label. In the names of nodes, which add role, rank and incarnation, a long one is shortened."""

RoleName = Annotated[
    str,
    Matching(pattern=_LABEL, expected="a role name of at most 20 lowercase letters, digits and hyphens", max_length=20),
]

DnsLabel = Annotated[
    str, Matching(pattern=_LABEL, expected="at most 63 lowercase letters, digits and inner hyphens", max_length=63)
]

LabelKey = Annotated[
    str,
    Matching(
        pattern=rf"({_LABEL}(\.{_LABEL})*/)?[A-Za-z0-9]([-._A-Za-z0-9]{{0,61}}[A-Za-z0-9])?",
        expected="a label key as Kubernetes takes it, such as project or acme.org/project",
        max_length=317,
    ),
]

LabelValue = Annotated[
    str,
    Matching(
        pattern=r"([A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?)?",
        expected="a label value as Kubernetes takes it: at most 63 letters, digits, '-', '_' and '.'",
        max_length=63,
    ),
]

SecretReference = Annotated[
    str,
    Matching(
        pattern=rf"{_LABEL}(\.{_LABEL})*/[-._a-zA-Z0-9]+",
        expected="a reference name/key to a secret, such as hf/token",
    ),
    Names(NamedKind.SECRET),
]


def _has_no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("expected a text without NUL characters")
    return text


Text = Annotated[str, AfterValidator(_has_no_nul)]
"""A text that an operating system accepts as an argument or a variable."""

_TEMPLATE = re.compile(r"\$\{\s*job\.([^{}]*)\}")
"""It takes linear time for every text: what it repeats ends where another one can begin."""
_TEMPLATE_NAMES = ("name", "namespace")


def _knows_its_names(text: str) -> str:
    for name in map(str.rstrip, _TEMPLATE.findall(text)):
        if name not in _TEMPLATE_NAMES:
            raise ValueError(f"${{job.{name}}} is unknown; expected ${{job.name}} or ${{job.namespace}}")
    return text


def fill_template(template: str, *, name: str, namespace: str) -> str:
    """Replaces `${job.name}` and `${job.namespace}` by the job's name and namespace."""
    values = {"name": name, "namespace": namespace}
    return _TEMPLATE.sub(lambda match: values.get(match[1].rstrip(), match[0]), template)


Template = Annotated[Text, AfterValidator(_knows_its_names)]
"""A text in which `${job.name}` and `${job.namespace}` are filled in."""

OWN_VARIABLES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "NODE_RANK",
        "ROLE_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)
"""Variables that the rendezvous sets for each process, and that users may not set."""

USERS_VARIABLES = frozenset({"PERDURE_EVENTS"})
"""Variables of Perdure's that are for users: where ranks write their events."""


def _is_not_ours(name: str) -> str:
    if name in OWN_VARIABLES:
        raise ValueError(f"{name} is set for each process by the rendezvous; remove it")
    if name.startswith("PERDURE_") and name not in USERS_VARIABLES:
        raise ValueError("names that begin with PERDURE_ are Perdure's own; rename it")
    if name.startswith("PET_"):
        raise ValueError(f"{name} is an option of torchrun that Perdure sets; use nodes and nproc_per_node")
    return name


Variable = Annotated[
    str,
    Matching(
        pattern=r"[A-Za-z_][A-Za-z0-9_]*", expected="the name of an environment variable: letters, digits, underscores"
    ),
    AfterValidator(_is_not_ours),
]
"""The name of an environment variable that users may set."""

Quantity = Annotated[
    str,
    Matching(
        pattern=r"\d+(\.\d+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?",
        expected="a quantity as Kubernetes writes it, such as 8, 500m, 64Gi or 1Ti",
    ),
]
"""An amount with Kubernetes' suffixes."""

AbsolutePath = Annotated[str, Matching(pattern=r"/[^\x00]*", expected="an absolute path")]

Integer = Annotated[int, Field(strict=True)]
"""A whole number: neither a text of digits nor true and false."""
