"""Warnings of states that no world of another size would have, by what scripts say literally."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.spec.load import validate_file

IMPORT = "from perdure_training.checkpoint import Checkpointer\n"


def warned(folder: Path, script: str, *, nodes: str = "2:3", more: str = "") -> bool:
    (folder / "train.py").write_text(script)
    job = folder / "job.yaml"
    job.write_text(
        f'name: job\nroles: {{worker: {{nodes: "{nodes}", command: [torchrun, train.py, --steps, "5"]}}}}\n{more}'
    )
    _, warnings = validate_file(job)
    return any("begins anew" in one.message and one.path == "roles.worker.nodes" for one in warnings)


def test_parts_that_each_node_keeps_alone_are_warned_of(tmp_path: Path):
    assert warned(tmp_path, f"{IMPORT}c = Checkpointer(every=1, copies=0)\n")
    assert warned(
        tmp_path, "from perdure_training.checkpoint import Checkpointer as C\nC(copies=0, replicated=False)\n"
    )


@pytest.mark.parametrize(
    "call",
    [
        "Checkpointer()",
        "Checkpointer(copies=1)",
        "Checkpointer(copies=0, replicated=True)",
        "Checkpointer(copies=0, replicated=choice)",
        "Checkpointer(copies=number)",
        "Checkpointer(**options)",
        "Checkpointer(copies=0, **options)",
        "[Checkpointer(copies=0), Checkpointer(name='other')]",
        "syntax error",
    ],
)
def test_what_is_not_known_is_not_warned_of(tmp_path: Path, call: str):
    assert not warned(tmp_path, f"{IMPORT}c = {call}\n")


def test_a_storage_or_a_fixed_number_of_nodes_or_another_library_needs_no_warning(tmp_path: Path):
    alone = f"{IMPORT}c = Checkpointer(copies=0)\n"
    assert not warned(tmp_path, alone, nodes="3")
    assert not warned(tmp_path, alone, more='checkpoint: {storage: "file:///tmp/ckpt"}\n')
    assert not warned(tmp_path, "from own import Checkpointer\nCheckpointer(copies=0)\n")
    (tmp_path / "train.py").unlink()
    assert not warned(tmp_path, "x" * (1 << 21))
