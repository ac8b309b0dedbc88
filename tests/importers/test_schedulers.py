"""Tests of recognizing the jobs of schedulers whose machines join."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.spec.errors import SpecError
from perdure.spec.importers.documents import import_documents
from perdure.spec.importers.schedulers import (
    refuse_batch_script,
    refuse_determined_experiment,
    refuse_skypilot_task,
)
from perdure.spec.load import SpecDocument
from tests.importers.golden import FIXTURES
from tests.support.command_line import CommandLine

SBATCH = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint $head:29500 train.py
"""
SKYPILOT = """
resources: {accelerators: H100:8}
num_nodes: 2
setup: pip install torch
run: |
  torchrun --nnodes=$SKYPILOT_NUM_NODES --node_rank=$SKYPILOT_NODE_RANK train.py --name 'a b'
"""


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (SBATCH, "srun perdure join NAME --wait --nodes 4 -- torchrun --nproc_per_node 8 train.py"),
        (
            "#!/bin/sh\n#SBATCH -J Llama_7B\n#SBATCH -N 2-8\npython -m torch.distributed.run -m pkg.train --x $Y\n",
            "srun perdure join llama-7b --wait --nodes 2:8 -- python -m torch.distributed.run -m pkg.train --x $Y",
        ),
        ("#!/bin/sh\n#SBATCH --exclusive\nsrun ./run.sh\n", "srun perdure join NAME --wait --nodes MIN:MAX -- COMMAND"),
        ("#PBS -N tune\n#PBS -l select=4\ntorchrun a.py\n", "pbsdsh -- perdure join tune --wait --nodes MIN:MAX -- "),
        (
            "#SBATCH -J sweep\n#SBATCH --array=0-9%2\nsrun torchrun a.py --seed $SEED\n",
            "srun perdure join sweep-$SLURM_ARRAY_TASK_ID --wait --nodes MIN:MAX -- torchrun a.py --seed $SEED",
        ),
        ("#PBS -N tune\n#PBS -J 0-9\ntorchrun a.py\n", "perdure join tune-$PBS_ARRAY_INDEX --wait"),
        ('#BSUB -J "tune[1-9]"\ntorchrun a.py\n', "perdure join tune-$LSB_JOBINDEX --wait"),
        ("#BSUB -J tune\ntorchrun a.py\n", "blaunch perdure join tune --wait --nodes MIN:MAX -- torchrun a.py"),
    ],
)
def test_a_batch_script_is_answered_with_the_command_of_its_machines(text: str, command: str, tmp_path: Path):
    path = tmp_path / "job.sbatch"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as error:
        refuse_batch_script(path)
    assert command in str(error.value)
    assert "is a batch script of" in str(error.value)


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.yaml")), ids=lambda path: path.stem)
def test_other_systems_files_are_no_batch_scripts(path: Path):
    refuse_batch_script(path)


def test_a_comment_that_mentions_a_directive_is_none():
    refuse_batch_script("kind: Job  # like #SBATCH --nodes\n# SBATCH --nodes=2\n")


@pytest.mark.parametrize("data", [{"run": "x"}, {"entrypoint": "python a.py", "resources": {}}, ["run"], "run", None])
def test_other_mappings_are_no_tasks_of_skypilot(data: object):
    refuse_skypilot_task(data)


@pytest.mark.parametrize(
    ("name", "text", "command"),
    [
        ("job.sbatch", SBATCH, "srun perdure join NAME --wait --nodes 4 -- torchrun --nproc_per_node 8 train.py"),
        ("task.yaml", SKYPILOT, "perdure join NAME --wait --nodes 2 -- torchrun train.py --name 'a b'"),
    ],
)
def test_import_names_the_command_to_write(name: str, text: str, command: str, tmp_path: Path):
    command_line = CommandLine(tmp_path, {"PERDURE_STATE": str(tmp_path / "state"), "COLUMNS": "300"})
    command_line.write(name, text)
    done = command_line.run("import", name)
    assert done.code == 2
    assert command in done.err
    assert done.out == ""


EXPERIMENT = {"name": "mnist", "resources": {"slots_per_trial": 4}, "searcher": {"name": "single", "metric": "loss"}}


@pytest.mark.parametrize(
    ("entrypoint", "instead"),
    [
        ("python3 -m determined.launch.torch_distributed python3 train.py --lr 1", "train.py --lr 1"),
        (["python3", "-m", "determined.launch.torch_distributed", "train.py"], "train.py"),
    ],
)
def test_an_experiment_of_determined_is_no_job_of_ray(entrypoint: object, instead: str):
    document = SpecDocument(data=EXPERIMENT | {"entrypoint": entrypoint}, lines={}, folder=None)
    with pytest.raises(SpecError, match="is an experiment of Determined") as raised:
        import_documents([document])
    assert f"perdure import -- torchrun --nproc-per-node=4 {instead}" in str(raised.value)


@pytest.mark.parametrize("data", [{"entrypoint": "python train.py"}, {"searcher": {}}, [], None])
def test_other_mappings_are_no_experiments_of_determined(data: object):
    refuse_determined_experiment(data)
