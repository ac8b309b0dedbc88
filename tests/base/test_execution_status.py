"""Tests that `perdure.base.executions` alone decides which workflows are open, and reads them whatever their status."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.source import parse

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("perdure", "workflows", "activities", "agent")
WORDS = ("ExecutionStatus", "list_workflows", "describe")
"""One of them is in each module that has something to find."""
HOME = ROOT / "perdure" / "base" / "executions.py"


def findings(path: Path, *, below: Path = ROOT) -> list[str]:
    """Places that compare statuses of the SDK, filter by status, or use calls that fail for unknown statuses."""
    found: list[str] = []
    if not any(word in path.read_text(encoding="utf-8") for word in WORDS):
        return found
    for node in ast.walk(parse(path)):
        match node:
            case ast.ImportFrom(module="temporalio.client", names=names):
                words = [name.name for name in names if name.name == "WorkflowExecutionStatus"]
            case ast.Call(func=ast.Attribute(attr="list_workflows" as name)):
                words = [name]
            case ast.Call(func=ast.Attribute(attr="describe" as name), args=[]):
                words = [name]
            case ast.Constant(value=str(text)) if "ExecutionStatus" in text:
                words = [text]
            case _:
                continue
        found += [f"{path.relative_to(below)}:{getattr(node, 'lineno', 0)}: {word}" for word in words]
    return sorted(found)


def test_no_other_module_decides_which_workflows_are_open():
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path != HOME]
    assert [finding for path in sorted(paths) for finding in findings(path)] == []


def test_the_search_finds_each_way_to_decide_it(tmp_path: Path):
    module = tmp_path / "module.py"
    module.write_text(
        "from temporalio.client import Client, WorkflowExecutionStatus\n"
        "client.list_workflows(query, limit=1)\n"
        "handle.describe(rpc_timeout=timeout)\n"
        """query = f"{first} AND ExecutionStatus = 'Running'"\n"""
    )
    assert [place.partition(":")[2].partition(":")[0] for place in findings(module, below=tmp_path)] == [
        "1",
        "2",
        "3",
        "4",
    ]
