"""Tests that users find what calls return and raise in `perdure` itself, and handle every error by one base class."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from importlib import import_module
from pkgutil import iter_modules

import pytest

import perdure
from perdure import contract
from perdure.base import errors


def test_every_exported_name_exists_and_is_imported_on_first_use():
    program = (
        "import sys, perdure\n"
        "assert not {'pydantic', 'temporalio'} & set(sys.modules)\n"
        "for name in perdure.__all__: getattr(perdure, name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_all_errors_are_exported_and_have_one_base_class():
    raised = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert {kind.__name__ for kind in raised} <= set(perdure.__all__)
    exported = [getattr(perdure, name) for name in perdure.__all__]
    exceptions = [kind for kind in exported if isinstance(kind, type) and issubclass(kind, Exception)]
    assert all(issubclass(kind, perdure.PerdureError) for kind in exceptions)
    assert perdure.SpecError in exceptions


def test_a_wrong_specification_is_handled_like_other_errors():
    with pytest.raises(perdure.PerdureError) as refused:
        perdure.parse_spec({"name": "a"})
    assert refused.value.exit_code == perdure.ExitCode.USAGE
    assert "perdure schema" in refused.value.remedy


def test_each_name_of_the_contract_is_defined_by_one_of_its_modules():
    """`perdure.contract` exports all of them: a second definition would silently replace the first one."""
    modules = [import_module(module.name) for module in iter_modules(contract.__path__, f"{contract.__name__}.")]
    defined = Counter(name for module in modules for name in getattr(module, "__all__", ()))
    assert [name for name, times in defined.items() if times > 1] == []
    assert len(defined) > 100
