from __future__ import annotations

from pathlib import Path
from typing import Any, get_origin

import pytest

from perdure.spec.backends import FIELD_SUPPORT, FieldSupport, check_backend
from perdure.spec.errors import SpecError
from perdure.spec.fields import field_at, is_model, strip
from perdure.spec.job import JobSpec
from perdure.spec.load import load_spec, validate_file
from perdure.spec.validate import validate_spec, validate_started

WORKER = {"nodes": 1, "command": ["a"]}


def spec(role: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"name": "a", "roles": {"worker": {**WORKER, **(role or {})}}, **fields}


def test_a_plain_job_of_pods_has_nothing_said_about_it():
    assert validate_spec(spec({"image": "x"}, backend="kubernetes", queue="q"))[1] == ()


def test_a_plain_local_job_has_nothing_said_about_it():
    assert validate_spec(spec())[1] == ()


def test_defaults_that_are_spelled_out_are_no_problem():
    every_default = JobSpec.model_validate(spec()).model_dump(mode="json")
    assert validate_spec(every_default)[1] == ()


def test_an_elastic_job_is_told_about_its_batch():
    warnings = validate_spec(spec({"nodes": "2:4"}))[1]
    assert "\n".join(str(warning) for warning in warnings) == (
        "roles.worker.nodes: a world may have 2 to 4 nodes; fewer nodes make a smaller global batch, unless the script "
        "adapts its own to WORLD_SIZE"
    )
    servers = {"nodes": "2:4", "command": ["python", "serve.py"], "ready": {"port": 6000}}
    assert validate_spec({**spec(), "roles": {**spec()["roles"], "ps": servers}})[1] == ()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (spec(backend="kubernetes"), "roles.worker.image: is missing; expected the name of a container image"),
        (
            spec({"image": "x"}, backend="kubernetes", workdir={"path": "x"}),
            'workdir.path: got "x"; expected an absolute path',
        ),
        (spec(backend="joined", workdir={"path": "x"}), 'workdir.path: got "x"; expected an absolute path'),
        (spec(runtime="x"), "runtime: has no meaning on the backend local; write the preset's fields"),
        (spec(volumes=[{"mount_path": "/a", "pvc": "b"}]), "volumes: has no meaning on the backend local; use paths"),
        (spec({"image": "x"}), "roles.worker.image: has no meaning on the backend local; the command runs with"),
        (spec({"pod_template": {"spec": {}}}), "roles.worker.pod_template: has no meaning on the backend local"),
        (spec(ray={"runtime_env": {"pip": ["x"]}}), "ray.runtime_env: has no meaning on the backend local; have its"),
        (
            spec({"image": "x"}, backend="ray"),
            "roles.worker.image: has no meaning on the backend ray; the command",
        ),
        (spec(backend="ray", volumes=[{"mount_path": "/a", "pvc": "b"}]), "volumes: has no meaning on the backend ray"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(data: dict[str, Any], text: str):
    with pytest.raises(SpecError) as caught:
        validate_spec(data)
    assert text in str(caught.value)
    with pytest.raises(SpecError) as again:
        check_backend(JobSpec.model_validate(data))
    assert text in str(again.value)


def test_a_workflow_of_pods_needs_the_folder_and_not_only_its_name():
    data = spec({"image": "x"}, backend="kubernetes", workdir={"path": "/x"})
    assert validate_spec(data)[1] == ()
    with pytest.raises(
        SpecError, match=r'workdir.path: was not uploaded, .* got "/x"; start the job by `perdure submit`'
    ):
        validate_started(data)
    data["workdir"]["archive"] = {"name": f"perdure-workdir-{'0' * 16}", "parts": 1, "digest": f"sha256:{'0' * 64}"}
    assert validate_started(data).workdir


def test_what_only_places_nodes_is_ignored_with_a_warning_and_its_line():
    _, warnings = validate_file(
        "name: a\nqueue: q\nroles:\n  worker:\n    nodes: 1\n    command: [a]\n    resources: {gpu: 8}\n"
    )
    assert [str(warning) for warning in warnings] == [
        "queue: has no meaning on the backend local and is ignored (line 2)",
        "roles.worker.resources: has no meaning on the backend local and is ignored (line 7)",
    ]


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_a_limit_of_memory_is_named_where_nothing_limits_it(backend: str):
    _, warnings = validate_spec(spec({"scaling": {"memory_max": "8Gi"}}, backend=backend))
    [warning] = warnings
    assert warning.path == "roles.worker.scaling.memory_max"
    assert warning.message.startswith(f"has no meaning on the backend {backend} and is ignored: nothing gives a node")


def test_what_ray_knows_is_no_warning_on_ray():
    role = {"resources": {"cpu": 1, "gpu": 1}, "ray": {"labels": {"zone": "a"}}, "python": "/opt/bin/python"}
    assert validate_spec(spec(role, backend="ray", ray={"runtime_env": {"pip": ["x"]}, "rack_label": "rack"}))[1] == ()
    ignored = validate_spec(spec({"resources": {"shm": "1Gi"}, "topology": {"required": "rack"}}, backend="ray"))[1]
    assert [str(warning) for warning in ignored] == [
        "roles.worker.resources.shm: has no meaning on the backend ray and is ignored",
        "roles.worker.topology: has no meaning on the backend ray and is ignored",
    ]


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"working_dir": "."}, "a folder of the submitting machine; expected the URL of a package"),
        ({"env_vars": {"A": "b"}}, "env_vars has no meaning for Perdure's nodes: set env"),
        ({"image_uri": "x"}, "image_uri has no meaning for Perdure's nodes"),
    ],
)
def test_a_runtime_environment_that_means_nothing_to_nodes_is_refused(environment: dict[str, Any], text: str):
    with pytest.raises(SpecError, match=text):
        validate_spec(spec(backend="ray", ray={"runtime_env": environment}))


def test_the_full_example_runs():
    assert check_backend(load_spec(Path(__file__).with_name("full_example.yaml")))


@pytest.mark.parametrize("support", FIELD_SUPPORT, ids=lambda support: ".".join(support.pattern))
def test_fields_that_are_said_to_lack_support_exist_and_are_empty_by_default(support: FieldSupport):
    parent = strip(field_at(tuple("worker" if part == "*" else part for part in support.pattern[:-1]))[0])
    assert is_model(parent)
    field = parent.model_fields[str(support.pattern[-1])]
    kind = strip(field.annotation)
    assert not field.default or field.default == kind() or get_origin(kind) in {list, dict}


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "TOKEN", "WANDB_API_KEY", "DB_PASSWORD", "SECRET", "MY_SECRETS", "db_password"]
)
@pytest.mark.parametrize(
    ("job", "stored"),
    [
        (spec(), "`perdure secret set NAME/KEY`"),
        (spec(backend="joined"), "`perdure secret set NAME/KEY`"),
        (spec({"image": "x"}, backend="kubernetes"), "a Secret of its namespace"),
    ],
    ids=["local", "joined", "kubernetes"],
)
def test_a_variable_that_looks_like_a_secret_is_a_warning_with_the_remedy(name: str, job: dict[str, Any], stored: str):
    (warning,) = validate_spec({**job, "env": {name: "hunter2", "OMP_NUM_THREADS": "1"}})[1]
    assert str(warning) == (
        f"env.{name}: looks like a secret, and its value becomes a part of the specification, which Temporal keeps; "
        f"`secrets: {{{name}: NAME/KEY}}` takes it from {stored}"
    )
    assert validate_spec({**job, "secrets": {name: "hf/token"}})[1] == ()


def test_a_secret_in_a_command_is_a_warning_that_names_the_word_and_not_the_secret():
    command = ["bash", "train.sh", "--token", "hunter2", "https://me:hunter2@host/x"]
    warnings = validate_spec(spec({"command": command}))[1]
    kept = (
        "looks like a secret, and becomes a part of the specification, which Temporal keeps, and of a command line, "
        "which other users of the machine can read; `secrets: {VARIABLE: NAME/KEY}` gives the command a variable with "
        "it, from `perdure secret set NAME/KEY`"
    )
    assert [str(warning) for warning in warnings] == [
        f"roles.worker.command[3]: the value of --token {kept}",
        f"roles.worker.command[4]: a part of it {kept}",
    ]


def test_a_variable_with_a_password_in_an_address_is_a_warning():
    (warning,) = validate_spec(spec(env={"DATABASE_URL": "postgres://me:hunter2@db/x"}))[1]
    assert str(warning).startswith("env.DATABASE_URL: looks like a secret")


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "TOKEN_LIMIT", "KEYBOARD", "SSH_KEY_FILE", "SECRET_NAME"])
def test_other_variables_are_no_warning(name: str):
    assert validate_spec(spec(env={name: "1"}))[1] == ()
    assert validate_spec(spec(env={"HF_TOKEN": ""}))[1] == ()
