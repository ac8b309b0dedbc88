from typing import Any

import pytest

from perdure.spec.validate import validate_spec


def warnings_of(*command: str, nodes: int | str = 1, **role: Any) -> str:
    _, warnings = validate_spec(
        {"name": "sizes", "roles": {"worker": {"nodes": nodes, "command": list(command), **role}}}
    )
    return "\n".join(str(warning) for warning in warnings if "torchrun" in str(warning))


@pytest.mark.parametrize("written", [("--nnodes", "2"), ("--nnodes=2",), ("--nnodes", "1:2")])
def test_nodes_of_torchrun_that_the_job_does_not_have_are_warned_of(written: tuple[str, ...]) -> None:
    value = written[-1].rpartition("=")[2]
    assert warnings_of("torchrun", *written, "train.py") == (
        f"roles.worker.command: --nnodes {value} of torchrun is not used: the role has 1 node, by its nodes "
        "(--nodes of `perdure run`)"
    )
    assert "the role has 2:4 nodes" in warnings_of("torchrun", *written, "train.py", nodes="2:4")


def test_processes_of_torchrun_that_the_job_names_otherwise_are_warned_of() -> None:
    assert warnings_of("torchrun", "--nproc_per_node=1", "train.py", nproc_per_node=2) == (
        "roles.worker.command: --nproc_per_node 1 of torchrun is used, and nproc_per_node 2 is not; write the same "
        "number, or leave one of them out"
    )


def test_a_torchrun_in_a_shell_is_read_too() -> None:
    assert "--nnodes 4 of torchrun is not used" in warnings_of("bash", "-c", "cd x && torchrun --nnodes 4 train.py")


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (["torchrun", "train.py", "--nnodes", "4"], {}),
        (["torchrun", "--nnodes=1", "--standalone", "train.py"], {}),
        (["torchrun", "--nnodes=2:4", "train.py"], {"nodes": "2:4"}),
        (["torchrun", "--nproc-per-node=2", "train.py"], {}),
        (["torchrun", "--nproc-per-node=2", "train.py"], {"nproc_per_node": 2}),
        (["bash", "-c", "torchrun --nnodes $NODES train.py"], {}),
        (["bash", "-c", "torchrun a.py; torchrun --nnodes 7 b.py"], {}),
        (["torchrun", "--no-such-option", "train.py"], {}),
        (["torchrun", "--nnodes=2", "train.py"], {"rendezvous": "env"}),
    ],
)
def test_sizes_that_agree_or_cannot_be_compared_are_not_warned_of(command: list[str], role: dict[str, Any]) -> None:
    assert warnings_of(*command, **role) == ""
