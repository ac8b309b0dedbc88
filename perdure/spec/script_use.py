"""How the scripts of a specification keep their state, as far as their text says it, without running them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from .backends import SpecWarning
from .job import JobSpec

_MOST_BYTES = 1 << 20
"""The size of the largest script that is read."""
_MODULE = "perdure_training.checkpoint"
_NAME = "Checkpointer"


def find_lost_states(spec: JobSpec) -> Iterator[SpecWarning]:
    """Warns of roles with several sizes whose state would follow none of them: each rank has a part of it in the memory
    of its own node only, and there is no storage."""
    folder = spec.workdir.path if spec.workdir is not None else None
    if folder is None or (spec.checkpoint is not None and spec.checkpoint.storage is not None):
        return
    for name, role in spec.roles.items():
        if not role.nodes.elastic or role.ready is not None:
            continue
        script = next((Path(folder, word) for word in role.command if word.endswith(".py")), None)
        if script is not None and _keeps_parts_alone(script):
            yield SpecWarning(
                location=("roles", name, "nodes"),
                message=f"a world may have {role.nodes.min} to {role.nodes.max} nodes, and {script.name} keeps each "
                "rank's part of the state on its own node only (copies=0): without a node its part is lost, and the "
                "training begins anew; leave out copies=0, or set checkpoint.storage",
            )


def _keeps_parts_alone(script: Path) -> bool:
    """Whether all that a script keeps in memory is parts without copies, by what it writes literally."""
    try:
        if not script.is_file() or script.stat().st_size > _MOST_BYTES:
            return False
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == _MODULE
        for alias in node.names
        if alias.name == _NAME
    }
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]
    return bool(calls) and all(_is_alone(call) for call in calls)


def _is_alone(call: ast.Call) -> bool:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    values = {name: value.value for name, value in given.items() if isinstance(value, ast.Constant)}
    return None not in given and values.get("copies") == 0 and not values.get("replicated", "replicated" in given)
