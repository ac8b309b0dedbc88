"""Where an imported job resumes, by the tracker files of DLRover, Megatron-LM and DeepSpeed."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.spec.importers.trackers import Trackers, read_trackers
from tests.importers.golden import FIXTURES
from tests.importers.test_import_command import command_line as command_line  # noqa: PLC0414
from tests.support.command_line import CommandLine

DLROVER, MEGATRON, DEEPSPEED = "dlrover_latest.txt", "latest_checkpointed_iteration.txt", "latest"


def checkpoints(folder: Path, *names: str, **trackers: str) -> Path:
    """A folder of checkpoints. A name that ends with `/` is an empty one."""
    for name in names:
        path = folder / name
        if name.endswith("/"):
            path.mkdir(parents=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("content")
    for name, text in trackers.items():
        tracker = {"dlrover": DLROVER, "megatron": MEGATRON, "deepspeed": DEEPSPEED}[name]
        (folder / tracker).write_text(text)
    return folder


def resumes(found: Trackers) -> tuple[int | None, str, str]:
    assert found.resume is not None, found.problems
    return found.resume.step, found.resume.path.name, found.resume.tracker.name


@pytest.mark.parametrize(
    ("names", "trackers", "expected"),
    [
        (["100/.metadata", "100/__0_0.distcp", "50/.metadata"], {"dlrover": "100"}, (100, "100", DLROVER)),
        (
            ["checkpoint-100/a", "checkpoint-1000/a"],
            {"dlrover": "100"},
            (100, "checkpoint-100", DLROVER),
        ),
        (["step-5/modeling/a.bin"], {"dlrover": "5\n"}, (5, "step-5", DLROVER)),
        (["ckpt_7.pt", "ckpt_17.pt"], {"dlrover": "7"}, (7, "ckpt_7.pt", DLROVER)),
        (["iter_0000100/mp_rank_00/m.pt"], {"dlrover": "100", "megatron": "100"}, (100, "iter_0000100", DLROVER)),
        (["iter_0000100/mp_rank_00/m.pt"], {"megatron": "100"}, (100, "iter_0000100", MEGATRON)),
        (["release/mp_rank_00/m.pt"], {"megatron": "release"}, (None, "release", MEGATRON)),
        (
            ["global_step40/m.pt"],
            {"deepspeed": "global_step40\n"},
            (40, "global_step40", DEEPSPEED),
        ),
        (["best/mp_rank_00_model_states.pt"], {"deepspeed": "best"}, (None, "best", DEEPSPEED)),
    ],
)
def test_the_checkpoint_that_a_tracker_names_is_found(
    tmp_path: Path, names: list[str], trackers: dict[str, str], expected: tuple[int | None, str, str]
):
    found = read_trackers(checkpoints(tmp_path, *names, **trackers))
    assert resumes(found) == expected
    assert not found.problems


def test_a_step_that_dlrover_has_not_completed_does_not_count(tmp_path: Path):
    names = ("iter_0000050/m.pt", "iter_0000100/m.pt")
    found = read_trackers(checkpoints(tmp_path, *names, dlrover="50", megatron="100"))
    assert resumes(found) == (50, "iter_0000050", DLROVER)
    assert found.problems == (f"{MEGATRON}: names iter_0000100, and {DLROVER} iter_0000050, which counts",)


@pytest.mark.parametrize(
    ("names", "trackers", "problem"),
    [
        ([], {}, "no tracker file is there"),
        (["100/a"], {"dlrover": ""}, "names no checkpoint: ''"),
        (["100/a"], {"dlrover": "10 0"}, "names no step: '10 0'"),
        (["100/a"], {"dlrover": "50"}, "names '50', and no such checkpoint is there"),
        (["100/"], {"dlrover": "100"}, "names '100', but 100 is empty"),
        (["100/__0_0.distcp"], {"dlrover": "100"}, "names '100', but 100 has no .metadata"),
        (["iter_0000100/a"], {"megatron": "\x00\x00"}, "names no iteration"),
        (["iter_0000100/a"], {"megatron": "releas"}, "names no iteration: 'releas'"),
        (["global_step40/a"], {"deepspeed": "global_step4"}, "no such checkpoint is there"),
        (["a/b"], {"deepspeed": "../a"}, "names no checkpoint: '../a'"),
        (["a/b"], {"deepspeed": ".."}, "no such checkpoint is there"),
    ],
)
def test_what_is_torn_or_missing_is_named(tmp_path: Path, names: list[str], trackers: dict[str, str], problem: str):
    found = read_trackers(checkpoints(tmp_path, *names, **trackers))
    assert found.resume is None
    [text] = found.problems
    assert problem in text


def test_a_torn_tracker_of_dlrover_leaves_the_framework_s(tmp_path: Path):
    found = read_trackers(checkpoints(tmp_path, "iter_0000100/a", dlrover="", megatron="100"))
    assert resumes(found) == (100, "iter_0000100", MEGATRON)
    assert len(found.problems) == 1


def test_import_says_where_the_job_resumes(command_line: CommandLine):
    folder = checkpoints(command_line.folder / "saves", "iter_0000100/a", dlrover="100", megatron="100")
    job = str(FIXTURES / "elasticjob-llama.yaml")
    done = command_line.run("import", job, "--backend", "local", "--checkpoints", str(folder))
    assert done.code == 0
    assert "resumes at step 100" in done.err
    done = command_line.run("import", job, "--backend", "local", "--checkpoints", str(folder), "-o", "json")
    assert done.json["resume"] == {
        "step": 100,
        "path": str(folder / "iter_0000100"),
        "tracker": str(folder / DLROVER),
        "problems": [],
    }
    (folder / DLROVER).write_text("")
    (folder / MEGATRON).unlink()
    done = command_line.run("import", job, "--backend", "local", "--checkpoints", str(folder))
    assert done.code == 0
    assert "dlrover_latest.txt: names no checkpoint" in done.err
    assert "resumes" not in done.err
