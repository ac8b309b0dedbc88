"""The docstrings of a section's fields, read from the source when somebody asks for them.

pydantic can read them as it builds a class (`use_attribute_docstrings`): that parses the source of every section, a
tenth of the time of each command, for texts that few commands show.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import cast

from pydantic import BaseModel

_TRIES = 10


@cache
def field_docstrings(model: type[BaseModel]) -> Mapping[str, str]:
    """Returns the docstring of each field of a model that has one, those of its base classes included."""
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if issubclass(kind, BaseModel) and kind is not BaseModel:
            found |= _own(kind)
    return {name: found[name] for name in model.model_fields if name in found}


def _own(kind: type) -> dict[str, str]:
    try:
        definition = _definition(kind)
    except (OSError, TypeError):
        # An application may be packed without its source.
        return {}
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _definition(kind: type) -> ast.ClassDef:
    tries = 0
    while True:
        try:
            return cast("ast.ClassDef", ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0])
        except SystemError:
            # Before Python 3.13 this may happen where other code parses meanwhile (CPython's issue 106905).
            tries += 1
            if tries >= _TRIES:
                raise
