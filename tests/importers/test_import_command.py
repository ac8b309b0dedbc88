"""Tests of `perdure import` for users and for scripts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from perdure.spec.load import load_spec
from tests.importers.golden import FIXTURES
from tests.support.command_line import PERDURE, CommandLine


@pytest.fixture
def command_line(tmp_path: Path) -> Iterator[CommandLine]:
    """On a machine where nothing of ours runs, and nothing is started."""
    state = tmp_path / "state"
    yield CommandLine(tmp_path, {"PERDURE_STATE": str(state), "TEMPORAL_ADDRESS": "", "COLUMNS": "100"})
    assert not state.exists()


def test_stdout_is_the_specification_and_stderr_the_warnings(command_line: CommandLine):
    done = command_line.run("import", str(FIXTURES / "pytorchjob-elastic.yaml"), "--backend", "local")
    assert done.code == 0
    assert 'warning: spec.elasticPolicy.rdzvBackend ("c10d"): left out: Perdure' in done.err
    assert "(line 8)" in done.err
    path = command_line.write("job.yaml", done.out)
    assert load_spec(path).name == "elastic-imagenet"
    assert command_line.run("validate", "job.yaml").code == 0


def test_texts_that_look_like_other_values_stay_texts_in_the_file(command_line: CommandLine):
    words = ["train.py", "--lr", "1e-4", "--mode", "0o17", "--flag", "on", "--layers", "2:8"]
    done = command_line.run("import", "--backend", "local", "--", "torchrun", *words)
    path = command_line.write("job.yaml", done.out)
    assert load_spec(path).roles["worker"].command == ["torchrun", *words]


def test_json_says_what_became_of_each_field(command_line: CommandLine):
    done = command_line.run("import", str(FIXTURES / "elasticjob-llama.yaml"), "--backend", "local", "-o", "json")
    assert done.code == 0
    report = done.json
    assert report["format"] == "DLRover ElasticJob"
    assert report["missing"] == []
    assert report["spec"]["roles"]["worker"]["nodes"] == {"min": 2, "max": 4, "unit": 2}
    assert {"source": "metadata.namespace", "field": "namespace"} in report["carried"]
    ignored = {warning["path"] for warning in report["warnings"] if warning["fate"] == "ignored"}
    assert {"spec.envs", "spec.optimizeMode", "spec.replicaSpecs.worker.autoScale"} <= ignored
    assert all(warning["line"] and warning["message"] for warning in report["warnings"])


def test_a_job_comes_from_the_standard_input_and_its_runtime_from_another_file(command_line: CommandLine):
    runtime, job, _ = (FIXTURES / "trainjob.yaml").read_text(encoding="utf-8").split("---\n")
    command_line.write("runtime.yaml", runtime)
    done = subprocess.run(
        [*PERDURE, "import", "-", "--with", "runtime.yaml", "--backend", "local", "--name", "other"],
        cwd=command_line.folder,
        input=job,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    spec = yaml.safe_load(done.stdout)
    assert spec["name"] == "other"
    assert spec["roles"]["worker"]["nodes"] == 4


def test_a_command_line_is_imported(command_line: CommandLine):
    done = command_line.run(
        "import", "--", "torchrun", "--nnodes", "2:4", "--nproc-per-node", "8", "train.py", "-o", "x"
    )
    assert done.code == 0
    assert yaml.safe_load(done.out) == {
        "name": "train",
        "roles": {
            "worker": {"nodes": "2:4", "nproc_per_node": 8, "command": ["torchrun", "train.py", "-o", "x"]},
        },
    }
    assert not done.err


def test_without_a_command_the_user_is_told_to_write_it(command_line: CommandLine):
    command_line.write(
        "job.yaml",
        "apiVersion: batch/v1\nkind: Job\nmetadata: {name: a}\nspec: {parallelism: 2, completionMode: Indexed, "
        "template: {spec: {containers: [{name: a, image: b, args: [c]}]}}}\n",
    )
    done = command_line.run("import", "job.yaml")
    assert done.code == 2
    assert yaml.safe_load(done.out)["roles"]["worker"]["nodes"] == 2, "what is known is printed"
    assert "roles.worker.command: the source names no command" in done.err
    assert 'containers[0].args (["c"]): left out' in done.err
    assert command_line.run("import", "job.yaml", "--run").code == 2


JOB = "apiVersion: batch/v1\nkind: Job\nmetadata: {name: a}\nspec:\n  parallelism: 2\n  template: {spec: {containers: "


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            JOB + "[{name: a, command: torchrun a.py}]}}\n",
            'containers[0].command: got "torchrun a.py"; expected a list',
        ),
        (JOB + "[{name: a, command: [torchrun, a.py], env: [{name: A, value: 1}]}]}}\n", "env[0].value: got 1"),
        (JOB + "[{name: a}, {name: b}]}}\n", "spec.template.spec.containers: the containers"),
        (JOB + "[{name: a, command: [torchrun, a.py], resources: {limits: {cpu: lots}}}]}}\n", "expected a quantity"),
        (JOB.replace("2", "two") + "[{name: a, command: [torchrun, a.py]}]}}\n", 'spec.parallelism: got "two"'),
        (JOB.replace("batch/v1", "batch/v2") + "[]}}\n", 'apiVersion: got "batch/v2"; expected batch/v1'),
        ("kind: Deployment\nmetadata: {name: a}\n", "document: got Deployment; expected one job: ElasticJob"),
        (
            JOB.replace("batch/v1", "batch.volcano.sh/v1alpha1") + "[]}}\n",
            "document: got Job (batch.volcano.sh/v1alpha1)",
        ),
        (JOB.replace("batch/v1", "batch.volcano.sh/v1alpha1") + "[]}}\n", "JobSet, Job (batch/v1) or RayJob"),
        ("apiVersion: kubeflow.org/v1\nkind: MPIJob\n", "write the job as v2beta1"),
        ("kind: LeaderWorkerSet\n", "`perdure import -- COMMAND` converts a command that starts torchrun"),
        (
            "kind: AppWrapper\nspec: {components: [{template: {kind: Job}}]}\n",
            "write the Job at spec.components[0].template",
        ),
        (
            "kind: Workflow\nspec:\n  manifest: |\n    kind: TrainJob\n    metadata: {}\n",
            "write the TrainJob at spec.manifest",
        ),
        ("name: a\nroles: {worker: {nodes: 2, command: [a]}}\n", "is a Perdure specification already"),
        ("apiVersion: trainer.kubeflow.org/v1alpha1\nkind: TrainJob\nspec: {runtimeRef: {name: t}}\n", "--with"),
        ("apiVersion: elastic.iml.github.io/v1alpha1\nkind: ElasticJob\nspec: {replicaSpecs: {ps: {}}}\n", "missing"),
        ("entrypoint: torchrun a.py; torchrun b.py\n", "entrypoint: starts torchrun 2 times"),
        ("entrypoint: torchrun --nodes 2 a.py\n", "did you mean --nnodes?"),
        ("runtime_env: {}\nentrypoint: []\n", "entrypoint: got an empty list; expected a text"),
        ("a: [\n", "not valid YAML at line 2"),
        ("- a\n", "expected a mapping"),
        ("\n", "expected one job"),
    ],
)
def test_invalid_files_are_refused_with_path_and_reason(command_line: CommandLine, text: str, words: str):
    command_line.write("job.yaml", text)
    done = command_line.run("import", "job.yaml")
    assert done.code == 2, done
    assert "job.yaml: " in done.err
    assert words in done.err
    assert not done.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.yaml"], "missing.yaml: No such file or directory"),
        (["a.yaml", "b.yaml"], "one file at a time"),
        (["--backend", "cloud", "--", "torchrun", "a.py"], "expected local, kubernetes"),
        (["--with", "a.yaml", "--", "torchrun", "a.py"], "a command refers to no other files"),
        (["--", "python", "a.py"], "starts neither torchrun nor dlrover-run"),
        (["--run", "--", "no/such/torchrun", "a.py"], 'there is no program "no/such/torchrun"'),
    ],
)
def test_wrong_use_exits_with_2_and_says_what_is_wrong(command_line: CommandLine, arguments: list[str], words: str):
    done = command_line.run("import", *arguments)
    assert done.code == 2, done
    assert words in " ".join((done.out + done.err).replace("│", " ").split())


def test_a_job_of_ray_is_for_ray(command_line: CommandLine):
    done = command_line.run("import", str(FIXTURES / "rayjob.yaml"))
    assert yaml.safe_load(done.out)["backend"] == "ray"
    refused = command_line.run("import", str(FIXTURES / "rayjob.yaml"), "--backend", "slurm")
    assert refused.code == 2
    assert "expected local, kubernetes, joined, ray" in " ".join(refused.err.replace("│", " ").split())


def test_a_job_of_a_system_without_a_backend_is_told_where_it_runs(command_line: CommandLine):
    done = command_line.run("import", str(FIXTURES / "jobconfig.yaml"))
    assert "the specification is for the backend local" in " ".join(done.err.split())
    assert "backend" not in yaml.safe_load(done.out)


def test_help_names_the_formats(command_line: CommandLine):
    shown = command_line.run("import", "--help")
    assert shown.code == 0
    for word in ("ElasticJob", "PyTorchJob", "TrainJob", "JobSet", "RayJob", "perdure import"):
        assert word in shown.out


def test_a_file_that_names_another_ray_cluster_than_the_workers_is_refused(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PERDURE_RAY_ADDRESS", "127.0.0.1:6379")
    done = command_line.run("import", "--run", str(FIXTURES / "ray-submission.yaml"))
    assert done.code == 2
    assert "dashboardUrl names the Ray cluster of http://head:8265, and PERDURE_RAY_ADDRESS that of" in done.err
    assert "127.0.0.1:6379" in done.err
