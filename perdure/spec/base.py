"""What all parts of the job specification share: the model's strictness, and texts that must look a certain way.

A specification is refused as a whole or taken as a whole: an unknown field is an error, since a misspelt
`max_restart` that is ignored costs a night of training.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema


class Section(BaseModel):
    """A part of the specification: immutable and strict about its fields; docstrings describe them everywhere."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


@dataclass(frozen=True, kw_only=True)
class Matching:
    """Restricts a text to a pattern, and says in words what that is."""

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
        expected="at most 40 lowercase letters, digits and inner hyphens",
        max_length=40,
    ),
]
"""A DNS label, short enough to leave room for role, rank and incarnation in the names of nodes."""

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
]

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
