"""Tests of recognizing commands that start torchrun, and of changing them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from perdure_launcher.supervisor.commands import (
    RankCommand,
    begins_with_torchrun,
    expected_ranks,
    instead_of_deepspeed,
    launches_elsewhere,
    starts_torchrun,
)


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun", "train.py"],
        ["/opt/venv/bin/torchrun", "--nproc-per-node=2", "train.py"],
        ["python", "-m", "torch.distributed.run", "train.py"],
        ["python3", "-u", "-m", "torch.distributed.launch", "train.py"],
        ["uv", "run", "torchrun", "train.py"],
        ["env", "A=b", "torchrun", "train.py"],
        ["accelerate", "launch", "train.py"],
        ["accelerate-launch", "train.py"],
        ["python", "-m", "accelerate.commands.launch", "train.py"],
        ["python", "-m", "debugpy", "--listen", "5678", "-m", "torch.distributed.run", "train.py"],
        ["conda", "run", "-n", "env", "torchrun", "-m", "package.train"],
        ["deepspeed", "--num_gpus", "2", "train.py"],
        ["fabric", "run", "train.py"],
        ["lightning", "run", "model", "train.py"],
        ["bash", "-c", "cd /code && exec torchrun train.py"],
        ["bash", "-lc", "python -m torch.distributed.run train.py"],
        ["sh", "-eu", "run.sh", "--fast"],
        ["./run.sh"],
    ],
)
def test_torchrun_is_recognised(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("#!/usr/bin/env bash\n# starts training\nexport A=1\ntorchrun \\\n  train.py\n")
    assert starts_torchrun(command, workdir=tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        ["python", "train.py", "--launcher", "torchrun"],
        ["python", "-m", "mypackage.train"],
        ["python", "-m", "mypackage.train", "--strategy", "deepspeed", "--output", "runs/accelerate"],
        ["./binary"],
        ["bash", "plain.sh"],
        ["bash", "missing.sh"],
        ["bash", "-c", "python my_torchrun_like.py"],
        ["bash", "-c", "python -m lightning_app; cd fabric; run"],
        ["./helper.py"],
        ["./tool"],
    ],
)
def test_other_commands_are_given_their_environment(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "plain.sh").write_text("# torchrun would be better\npython train.py\n")
    (tmp_path / "binary").write_bytes(b"\x7fELF\0torchrun")
    (tmp_path / "tool").write_text("#!/usr/bin/python3\n# wraps torchrun\n")
    (tmp_path / "helper.py").write_text("#!/usr/bin/env python\nimport torch.distributed.run\n")
    assert not starts_torchrun(command, workdir=tmp_path)


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        ("deepspeed t.py --deepspeed ds.json", "torchrun t.py --deepspeed ds.json"),
        ("/opt/bin/python /opt/bin/deepspeed --num_gpus 2 t.py", "torchrun --nproc-per-node=2 t.py"),
        ("deepspeed --num_gpus=2 --hostfile=/job/hostfile -i node-1:0,1 --no_ssh t.py -i 3",
         "torchrun --nproc-per-node=2 t.py -i 3"),
        ("deepspeed --module pkg.train --lr 1", "torchrun -m pkg.train --lr 1"),
        ("deepspeed t.py --token abc", "torchrun t.py --token '[redacted]'"),
        ("python3.12 -u -m deepspeed.launcher.launch --world_info=e30= --master_port=29500 t.py", "torchrun t.py"),
        ("deepspeed --help", "torchrun SCRIPT"),
        ("python -m pip install deepspeed", ""),
        ("ls deepspeed", ""),
        ("torchrun t.py --deepspeed ds.json", ""),
        ("python", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_deepspeeds_launcher_is_recognised_and_torchrun_written_instead(command: str, instead: str) -> None:
    assert instead_of_deepspeed(command.split()) == instead


@pytest.fixture
def torchrun(tmp_path: Path) -> Path:
    path = tmp_path / "torchrun"
    path.write_text("#!/opt/venv/bin/python3\nmain()\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("docker run --gpus all --rm image torchrun --nproc-per-node 8 train.py", "docker"),
        ("/usr/bin/python3 /usr/bin/podman exec box python -m torch.distributed.run train.py", "podman"),
        ("ssh node-1 'cd /code; accelerate launch train.py'", "ssh"),
        ("kubectl exec pod -- bash -c 'torchrun train.py'", "kubectl"),
        ("tmux new-session -d -s train 'cd /code && torchrun train.py'", "tmux"),
        ("tmux send-keys -t train 'torchrun train.py' Enter", "tmux"),
        ("screen -dmS train torchrun train.py", "screen"),
        ("tmux new -d -s board tensorboard --logdir runs", ""),
        ("docker run -v /data/torchrun:/data image python prepare.py", ""),
        ("docker build -t torchrun .", ""),
        ("apptainer exec --nv image.sif torchrun train.py", ""),
        ("torchrun docker.py run torchrun", ""),
    ],
)
def test_a_torchrun_that_another_program_starts_elsewhere_is_recognised(command: str, program: str) -> None:
    assert launches_elsewhere(shlex.split(command)) == program


@pytest.mark.parametrize(
    ("options", "arguments", "processes"),
    [
        (["t.py"], ("-u", "t.py"), None),
        (["--nproc-per-node=4", "t.py", "--lr", "1"], ("-u", "t.py", "--lr", "1"), 4),
        (["--nproc_per_node", "2", "--standalone", "t.py"], ("-u", "t.py"), 2),
        (["--rdzv-backend", "c10d", "-m", "pkg.train", "-v"], ("-u", "-m", "pkg.train", "-v"), None),
    ],
)
def test_what_torchrun_will_start_is_foreseen(
    options: list[str], arguments: tuple[str, ...], processes: int | None, torchrun: Path
) -> None:
    folder = torchrun.parent
    expected = RankCommand("/opt/venv/bin/python3", arguments, processes)
    assert expected_ranks(["torchrun", *options], path=str(folder), workdir=folder) == expected
    python = torchrun.rename(folder / "python3.12")
    by_module = ["python3.12", "-m", "torch.distributed.run", *options]
    expected = RankCommand(str(python), arguments, processes)
    assert expected_ranks(by_module, path=str(folder), workdir=folder) == expected


@pytest.mark.parametrize(
    "command",
    [
        ["bash", "run.sh"],
        ["torchrun", "--no-python", "./binary"],
        ["torchrun", "--nproc-per-node=gpu", "t.py"],
        ["torchrun", "--help"],
        ["torchrun"],
        ["no-such-program", "t.py"],
        [],
    ],
)
def test_what_cannot_be_read_from_the_command_is_not_guessed(command: list[str], torchrun: Path) -> None:
    assert expected_ranks(command, path=f"{torchrun.parent}:/bin:/usr/bin", workdir=torchrun.parent) is None


def test_a_script_of_another_interpreter_is_not_guessed(torchrun: Path) -> None:
    torchrun.write_text("#!/bin/sh\nexec python main.py\n")
    assert expected_ranks(["torchrun", "t.py"], path=str(torchrun.parent), workdir=torchrun.parent) is None


@pytest.mark.parametrize(
    ("command", "alone"),
    [
        (["torchrun", "train.py"], True),
        (["uv", "run", "torchrun", "train.py"], True),
        (["python", "-m", "torch.distributed.run", "train.py"], True),
        (["accelerate", "launch", "train.py"], True),
        (["bash", "-c", "pip install -e . && torchrun train.py"], False),
        (["/bin/sh", "run.sh"], False),
        (["./run.sh"], False),
        (["python", "prepare_and_train.py"], False),
    ],
)
def test_only_what_is_torchrun_itself_does_no_other_work_before(command: list[str], alone: bool) -> None:
    assert begins_with_torchrun(command) is alone
