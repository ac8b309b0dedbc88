"""Tests of importing command lines of torchrun and dlrover-run, alone and inside shells."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.spec.errors import SpecError
from perdure.spec.importers.documents import import_command
from perdure.spec.importers.launchers import read_launch
from perdure.spec.importers.shell import as_words, fill_variables
from perdure.spec.validate import validate_spec


def worker(*command: str) -> dict[str, Any]:
    result = import_command(command)
    assert result.missing == ()
    validate_spec(result.spec)
    return result.spec["roles"]["worker"]


@pytest.mark.parametrize(
    ("command", "nodes", "processes", "left"),
    [
        ("torchrun train.py", 1, 1, "torchrun train.py"),
        ("torchrun --nnodes=2:4 --nproc_per_node 8 train.py --lr 1", "2:4", 8, "torchrun train.py --lr 1"),
        ("torchrun --nnodes 2:2 --nproc-per-node=gpu -m pkg.train", 2, "gpu", "torchrun -m pkg.train"),
        ("torchrun --nnode 3 --nproc 2 train.py", 3, 2, "torchrun train.py"),
        ("torchrun --log-dir /logs -t 3 -r3 --tee=3 train.py", 1, 1, None),
        ("torchrun train.py --nnodes 9 --rdzv-id x", 1, 1, "torchrun train.py --nnodes 9 --rdzv-id x"),
        ("torchrun --standalone --nproc-per-node cpu train.py", 1, None, "torchrun --nproc-per-node cpu train.py"),
        ("python -m torch.distributed.run --nnodes=2 a.py", 2, 1, "python -m torch.distributed.run a.py"),
        ("python3 -u -m torch.distributed.launch --use_env --nnodes=2 a.py", 2, 1, None),
        ("uv run torchrun --nnodes 2 a.py", 2, 1, "uv run torchrun a.py"),
        ("/opt/venv/bin/torchrun --nnodes 2 a.py", 2, 1, "/opt/venv/bin/torchrun a.py"),
        ("dlrover-run --nnodes=2:4 --max_restarts=3 a.py", "2:4", 1, "torchrun a.py"),
        ("dlrover-run --auto-config --precheck 1 a.py", 1, "gpu", "torchrun a.py"),
        ("python -m dlrover.trainer.torch.elastic_run --nnodes=2 a.py", 2, 1, "python -m torch.distributed.run a.py"),
    ],
)
def test_options_become_fields(command: str, nodes: Any, processes: Any, left: str | None):
    role = worker(*command.split())
    assert role["nodes"] == nodes
    assert role.get("nproc_per_node") == processes
    if left is not None:
        assert role["command"] == left.split()


def test_a_unit_makes_worlds_its_multiples():
    result = import_command(["dlrover-run", "--nnodes=3:7", "--node_unit=2", "train.py"])
    assert result.spec["roles"]["worker"]["nodes"] == {"min": 4, "max": 6, "unit": 2}
    assert any("worlds are multiples of 2 nodes" in warning.message for warning in result.warnings)


def test_timeouts_and_restarts_have_fields():
    command = "torchrun --max-restarts=5 --rdzv-conf=join_timeout=90,last_call_timeout=7,read_timeout=3 train.py"
    result = import_command(command.split())
    assert result.spec["retry"] == {"max_restarts": 5}
    assert result.spec["timing"] == {"rendezvous": {"join_timeout": "90s", "last_call": "7s"}}
    assert [warning.path for warning in result.warnings] == [
        "command --max-restarts",
        "command --rdzv-conf read_timeout=3",
    ]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python train.py", "perdure run --nodes MIN:MAX -- COMMAND"),
        ("torchrun --nnodes 2", "names no training script"),
        ("torchrun --nodes 2 train.py", "--nodes, which the launcher does not have; did you mean --nnodes?"),
        ("torchrun --nnodes", "--nnodes has no value"),
        ("dlrover-run --nnode 2 train.py", "--nnode, which the launcher does not have"),
        ("torchrun --nnodes 0 train.py", "at least one node"),
        ("torchrun --nnodes 4:2 train.py", "4 to 2 nodes"),
    ],
)
def test_wrong_command_lines_are_refused_with_the_reason(command: str, words: str):
    with pytest.raises(SpecError) as error:
        import_command(command.split())
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dlrover-run --nnodes=$N train.py", ["torchrun", "train.py"]),
        ("  torchrun --nnodes=2 \\\n   train.py  --name 'a b'\n", ["torchrun", "train.py", "--name", "a b"]),
        ("exec torchrun --nnodes=2 train.py", ["bash", "-c", "exec torchrun train.py"]),
        ("cd /x && torchrun --nnodes=2 train.py", ["bash", "-c", "cd /x && torchrun train.py"]),
        ("A=1 torchrun --nnodes=2 train.py > $LOG", ["bash", "-c", "A=1 torchrun train.py > $LOG"]),
        ("torchrun --nnodes=2 train.py --x=$Y", ["bash", "-c", "torchrun train.py --x=$Y"]),
        ("torchrun --nnodes=2 train.py 2>&1 | tee l", ["bash", "-c", "torchrun train.py 2>&1 | tee l"]),
        ("pip install torchrun; torchrun --nnodes 2 a.py", ["bash", "-c", "pip install torchrun; torchrun a.py"]),
        ("# torchrun no\ntorchrun --nnodes 2 a.py", ["bash", "-c", "# torchrun no\ntorchrun a.py"]),
    ],
)
def test_shell_texts_keep_all_but_the_options(text: str, expected: list[str]):
    launch = read_launch(["bash", "-c", text])
    assert launch is not None
    assert launch.command() == expected


def test_an_option_with_a_substitution_is_one_word():
    launch = read_launch(["sh", "-c", "torchrun --nproc-per-node=$(nvidia-smi -L | wc -l) --nnodes ${N:-2} a.py"])
    assert launch is not None
    assert [(given.name, given.value) for given in launch.given] == [
        ("nproc-per-node", "$(nvidia-smi -L | wc -l)"),
        ("nnodes", "${N:-2}"),
    ]
    assert launch.command(keep=launch.given[:1])[-1] == "torchrun --nproc-per-node=$(nvidia-smi -L | wc -l) a.py"


@pytest.mark.parametrize(
    ("word", "filled"),
    [("$N", "4"), ("1:${N}", "1:4"), ("${M:-2}", "2"), ("$M", None), ("$(nproc)", None), ("`nproc`", None), ("8", "8")],
)
def test_variables_are_filled_in_where_they_are_known(word: str, filled: str | None):
    assert fill_variables(word, {"N": "4"}) == filled


@pytest.mark.parametrize(
    "text", ["a | b", "a > b", "a; b", "a $B", "a *.py", "cd x", "A=1 b", "a 'open", "(a)", "a\nb", ""]
)
def test_what_needs_a_shell_keeps_it(text: str):
    assert as_words(text) is None
