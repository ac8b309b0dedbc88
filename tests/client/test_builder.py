"""Tests of jobs that are built in Python: they are those of files, and wrong options are named."""

from __future__ import annotations

import asyncio
import os
import runpy
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from perdure import JobBuilder, JobPhase, SpecError, load_spec
from perdure.client.client import Client
from perdure.spec.load import read_documents
from perdure.spec.validate import validate_spec
from scripts.spec_fields import FILE, spec_fields
from tests.docs.pages import ROOT

EXAMPLE = ROOT / "examples" / "07-job-builder" / "jobs.py"


def complete(name: str = "grpo") -> JobBuilder:
    return JobBuilder(
        name,
        env={"LOG_LEVEL": "info"},
        retry={"window": timedelta(minutes=90), "rules": [{"match": {"exit_codes": [3]}, "action": "stop"}]},
        checkpoint={"storage": "s3://bucket/${job.name}", "every": timedelta(minutes=10)},
    ).role(
        "trainer",
        nodes={"min": 2, "max": 8, "unit": 2},
        command=["torchrun", "train.py", "--lr", "1e-4", "--resume", "on"],
        resources={"gpu": 8, "cpu": 96, "memory": "1Ti"},
    )


def of_roles(name: str) -> JobBuilder:
    return (
        JobBuilder(name, env={"SHARED": "job", "OWN": "job"}, workdir={"path": "/"})
        .role("prepare", nodes=1, command=["sh", "-c", "echo $SHARED $OWN"], env={"OWN": "prepare"})
        .role(
            "trainer",
            nodes=1,
            command=["sh", "-c", "echo $SHARED $OWN"],
            depends_on={"prepare": "completed"},
            on_failure="job",
            restart_with=["prepare"],
        )
    )


def test_roles_are_built_with_their_relations_and_variables() -> None:
    spec = of_roles("grpo").build()
    assert list(spec.roles) == ["prepare", "trainer"]
    assert spec.roles["trainer"].depends_on == {"prepare": "completed"}
    assert (spec.env_of("prepare"), spec.env_of("trainer")) == (
        {"SHARED": "job", "OWN": "prepare"},
        {"SHARED": "job", "OWN": "job"},
    )
    with pytest.raises(SpecError, match=r"roles\.eval\.depends_on.*trainer"):
        of_roles("grpo").role("eval", nodes=1, command=["a"], depends_on={"trainr": "ready"}).build()


def test_a_variable_of_a_role_is_no_secret_of_the_job() -> None:
    builder = of_roles("grpo").options(secrets={"OWN": "own/key"}, env={})
    with pytest.raises(SpecError, match=r"OWN is in roles\.prepare\.env and in secrets; expected one of them"):
        builder.build()


def test_a_built_job_is_that_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "job.yaml"
    file.write_text(complete().to_yaml(), encoding="utf-8")
    assert load_spec(file) == complete().build()
    workdir = complete().build().workdir
    assert workdir is not None
    assert workdir.path == str(tmp_path)


def test_the_file_says_what_the_program_said() -> None:
    text = complete().options(labels={"project": "a"}).to_yaml()
    assert "every: 10m" in text
    assert "window: 1h30m" in text
    assert "- '1e-4'" in text
    assert "project: a" in text


def test_the_options_are_the_fields_of_the_specification() -> None:
    assert FILE.read_text(encoding="utf-8") == spec_fields(), "run: make docs"


@pytest.mark.long("commands")
def test_a_type_checker_refuses_wrong_options(tmp_path: Path) -> None:
    mistakes = [
        'JobBuilder("a", retry={"max_restart": 3})',
        'JobBuilder("a", limits={"active_deadline": 30})',
        'JobBuilder("a").role("worker", nodes=1)',
        'JobBuilder("a").role("worker", nodes=1, command="torchrun a.py")',
        'JobBuilder("a", backend="k8s")',
    ]
    right = 'JobBuilder("a", backend="local").role("worker", nodes="1:2", command=["a"]).build()'
    file = tmp_path / "mistakes.py"
    file.write_text("\n".join(["from perdure import JobBuilder", right, *mistakes]), encoding="utf-8")
    checked = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(file)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    found = {line.partition("mistakes.py:")[2].partition(":")[0] for line in checked.stdout.splitlines()}
    assert found - {""} == {str(number) for number in range(3, 3 + len(mistakes))}, checked.stdout


def test_all_wrong_options_are_named_with_their_remedies() -> None:
    builder = JobBuilder("llama", retry={"max_restarts": -1}).role("trainer", nodes="8:2", command=["x"])
    with pytest.raises(SpecError) as refused:
        builder.build()
    assert str(refused.value).splitlines() == [
        "roles.trainer.nodes: min is 8 and max is 2; expected min to be at most max",
        "retry.max_restarts: got -1; expected an integer of at least 0",
    ]
    with pytest.raises(SpecError, match=r"roles\.trainer: is there already; rename one of them"):
        builder.role("trainer", nodes=1, command=["x"])


async def test_a_built_job_runs(client: Client, job_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    temporal = await client.connect()
    monkeypatch.setenv("TEMPORAL_NAMESPACE", temporal.namespace)
    script = ["sh", "-c", "echo $FIRST $SECOND"]
    built = JobBuilder(job_name, env={"FIRST": "job", "SECOND": "job"})
    built.role("worker", nodes=1, command=script, env={"SECOND": "role"})
    address = temporal.service_client.config.target_host
    submission = await asyncio.to_thread(lambda: built.submit(address=address))
    assert submission.name == job_name
    assert (await client.wait(job_name)).phase is JobPhase.SUCCEEDED
    assert [line.text async for line in client.logs(job_name)] == ["job role"]


def test_the_example_prints_a_valid_file_for_each_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "8", "2000"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    specs = [validate_spec(document.data)[0] for document in read_documents(capsys.readouterr().out)]
    assert [spec.name for spec in specs] == ["width-8", "width-2000"]
    assert [spec.limits.active_deadline for spec in specs] == [None, timedelta(hours=12)]
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 40


@pytest.mark.long("frameworks")
async def test_the_jobs_of_the_example_train(client: Client) -> None:
    temporal = await client.connect()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(EXAMPLE), "8", "--steps", "20", "--submit"),
        env={
            **os.environ,
            "TEMPORAL_ADDRESS": temporal.service_client.config.target_host,
            "TEMPORAL_NAMESPACE": temporal.namespace,
        },
    )
    assert await process.wait() == 0
    result = await client.wait("width-8")
    assert (result.phase, result.restarts) == (JobPhase.SUCCEEDED, 0)
