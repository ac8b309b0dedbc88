from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from perdure.spec.errors import SpecError, SpecProblem, format_path
from perdure.spec.load import load_spec, validate_file
from perdure.spec.validate import parse_spec, validate_spec

EVERY_KIND = """\
name: Llama_8B
rols: {}
backend: kubernets
lables: {a: b}
max_restarts: 3
env: {OMP_NUM_THREADS: 4, RANK: "1", "9x": y, PERDURE_NODE: a, PET_NNODES: "2"}
labels: {team: a b, 12: y}
workdir: {path: ., pth: x}
volumes: [{mount_path: data, pvc: 3}]
secrets: {HF_TOKEN: x}
roles:
  worker:
    nodes: {min: 0, max: 4}
    nproc_per_node: many
    command: torchrun train.py --lr 1e-4
    comand: x
    rendezvous: torchrn
    resources: {gpus: 8, cpu: lots}
    image: 4
    topology: {}
    ports: {http: 99999}
    image_pull_secrets: [a, 3]
recovery: {on_capacity_loss: shrnk, replace_timeout: soon}
retry: {max_restarts: "3", window: 0s, fatal_exit_codes: 2}
limits: [1]
outputs: {logs: "s3://logs/${job.nam}"}
ttl_after_finished: later
timing: {lease: {heartbeat: 2s, timeout: 3s}}
"""

EVERY_TEXT = """\
name: got "Llama_8B"; expected at most 63 lowercase letters, digits and inner hyphens (line 1)
rols: unknown field; did you mean "roles"? (line 2)
backend: got "kubernets"; expected local, kubernetes, joined or ray; did you mean "kubernetes"? (line 3)
lables: unknown field; did you mean "labels"? (line 4)
max_restarts: unknown field here; it belongs to retry (line 5)
env.OMP_NUM_THREADS: got 4; expected a text; in quotes: "4" (line 6)
env.RANK: RANK is set for each process by the rendezvous; remove it (line 6)
env.9x: got "9x"; expected the name of an environment variable: letters, digits, underscores (line 6)
env.PERDURE_NODE: names that begin with PERDURE_ are Perdure's own; rename it (line 6)
env.PET_NNODES: PET_NNODES is an option of torchrun that Perdure sets; use nodes and nproc_per_node (line 6)
labels.12: the key is 12; expected a text; put the key in quotes (line 7)
labels.team: got "a b"; expected a label value as Kubernetes takes it: at most 63 letters, digits, '-', '_' and '.' \
(line 7)
workdir.pth: unknown field; did you mean "path"? (line 8)
volumes[0].mount_path: got "data"; expected an absolute path (line 9)
volumes[0].pvc: got 3; expected a text; in quotes: "3" (line 9)
secrets.HF_TOKEN: got "x"; expected a reference name/key to a secret, such as hf/token (line 10)
roles.worker.nodes.min: got 0; expected an integer of at least 1 (line 13)
roles.worker.nproc_per_node: got "many"; expected an integer from 1 to 1024, gpu or auto (line 14)
roles.worker.command: got "torchrun train.py --lr 1e-4"; expected a list: [torchrun, train.py, --lr, '1e-4'] (line 15)
roles.worker.comand: unknown field; did you mean "command"? (line 16)
roles.worker.rendezvous: got "torchrn"; expected auto, torchrun or env; did you mean "torchrun"? (line 17)
roles.worker.resources.cpu: got "lots"; expected a quantity as Kubernetes writes it, such as 8, 500m, 64Gi or 1Ti \
(line 18)
roles.worker.resources.gpus: unknown field; did you mean "gpu"? (line 18)
roles.worker.image: got 4; expected a text; in quotes: "4" (line 19)
roles.worker.topology: got an empty mapping; expected exactly one of preferred and required (line 20)
roles.worker.ports.http: got 99999; expected an integer of at most 65535 (line 21)
roles.worker.image_pull_secrets[1]: got 3; expected a text; in quotes: "3" (line 22)
recovery.on_capacity_loss: got "shrnk"; expected shrink, wait or fail; did you mean "shrink"? (line 23)
recovery.replace_timeout: got "soon"; expected a duration such as 30s, 10m, 1h30m or 2d (line 23)
retry.max_restarts: got "3"; expected an integer (line 24)
retry.window: got "0s"; expected a duration longer than 0 (line 24)
retry.fatal_exit_codes: got 2; expected a list (line 24)
limits: got a list; expected a mapping (line 25)
outputs.logs: ${job.nam} is unknown; expected ${job.name} or ${job.namespace} (line 26)
ttl_after_finished: got "later"; expected a duration such as 30s, 10m, 1h30m or 2d (line 27)
timing.lease: lease.timeout must be at least twice lease.heartbeat, or one late heartbeat loses the lease (line 28)
"""


def worker(**fields: object) -> dict[str, object]:
    return {"name": "a", "roles": {"worker": {"nodes": 1, "command": ["a"], **fields}}}


def text_of(data: object) -> str:
    with pytest.raises(SpecError) as caught:
        parse_spec(data)
    return str(caught.value)


@pytest.mark.parametrize(
    ("written", "json_too"),
    [
        ("1.10", True),
        ("1e-4", True),
        ("010", False),
        ("0x1F", False),
        ("1.0E+3", True),
        ("True", False),
        ("-0.50", True),
    ],
)
def test_a_number_that_must_be_a_text_is_shown_as_it_is_written(written: str, json_too: bool) -> None:
    texts = [f"name: a\nroles: {{worker: {{nodes: 1, command: [b, {written}]}}}}\n"]
    if json_too:
        texts.append(f'{{"name": "a",\n"roles": {{"worker": {{"nodes": 1, "command": ["b", {written}]}}}}}}\n')
    for text in texts:
        with pytest.raises(SpecError) as raised:
            load_spec(text)
        expected = f'roles.worker.command[1]: got {written}; expected a text; in quotes: "{written}" (line 2)'
        assert str(raised.value) == expected


def test_every_kind_of_problem_is_named_at_once_with_its_line():
    with pytest.raises(SpecError) as caught:
        validate_file(EVERY_KIND)
    assert str(caught.value) + "\n" == EVERY_TEXT


def test_lines_survive_a_file(tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_text(EVERY_KIND)
    with pytest.raises(SpecError) as caught:
        validate_file(path)
    problem = next(problem for problem in caught.value.problems if problem.path == "roles.worker.nodes.min")
    assert (problem.value, problem.expected, problem.line) == ("0", "an integer of at least 1", 13)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (None, "specification: got nothing; expected a mapping with name and roles"),
        ([], "specification: got an empty list; expected a mapping with name and roles"),
        ("x", 'specification: got "x"; expected a mapping with name and roles'),
        (
            {},
            "name: missing (the name of the job); expected at most 63 lowercase letters, digits and inner hyphens\n",
        ),
        ({}, "roles: missing (the job's nodes, by the name of their role); expected a mapping"),
        ({"name": "a", "roles": {}}, "roles: got an empty mapping; expected one role, such as worker"),
        (
            {"name": "a", "roles": None},
            "roles: missing (the job's nodes, by the name of their role); expected a mapping",
        ),
        *(
            (worker() | {"network": {"store_ports": given}}, f"network.store_ports: {text}")
            for given, text in (
                (29500, 'got 29500; expected a text; in quotes: "29500"'),
                ("29500", 'got "29500"; expected a range of ports such as 29500-29599'),
                ("29500-29501", "names 2 ports; expected at least 8, the lower end first"),
                ("29599-29500", "names 0 ports; expected at least 8, the lower end first"),
                ("65000-70000", 'got "65000-70000"; expected ports from 1 to 65535'),
            )
        ),
        (worker(nodes=0), "roles.worker.nodes: got 0; expected at least 1 node"),
        (worker(nodes="4:2"), "roles.worker.nodes: min is 4 and max is 2; expected min to be at most max"),
        (
            worker(nodes={"min": 2, "max": 5, "unit": 2}),
            "roles.worker.nodes: unit is 2; expected min (2) and max (5) to be multiples of it",
        ),
        (worker(nodes={"min": 2}), "roles.worker.nodes.max: missing"),
        (worker(nodes="many"), 'roles.worker.nodes: got "many"; expected a number of nodes such as 4, a range such as'),
        (worker(nodes=True), "roles.worker.nodes: got true; expected a number of nodes such as 4"),
        (worker(nodes={}), "roles.worker.nodes: got an empty mapping; expected a number of nodes such as 4"),
        (worker(nodes=b"4"), "expected a number of nodes such as 4"),
        (worker(nodes=2_001), "roles.worker.nodes: got 2001; expected at most 2000 nodes"),
        (
            worker(nodes=None),
            (
                "roles.worker.nodes: missing (the number of nodes); expected a number of nodes such as 4, "
                "a range such as 2:8, auto, or a mapping of min, max and unit"
            ),
        ),
        (worker(command=[]), "roles.worker.command: got an empty list; expected a list that is not empty"),
        (worker(command=["a", 3]), 'roles.worker.command[1]: got 3; expected a text; in quotes: "3"'),
        (worker(command=["a\0"]), "roles.worker.command[0]: got"),
        (
            worker(command="cd x && torchrun t.py"),
            "expected a list: [bash, -c, 'cd x && torchrun t.py']",
        ),
        (worker(command=" "), "expected a list with the program and its arguments"),
        (worker(nproc_per_node=0), "roles.worker.nproc_per_node: got 0; expected an integer from 1 to 1024"),
        ({**worker(), "role": {}}, 'role: unknown field; did you mean "roles"?'),
        ({**worker(), "maxRestarts": 1}, "maxRestarts: unknown field"),
        (
            {**worker(), True: 1},
            'true: the key is true; expected a text; YAML reads the words "on", "yes" or "true" as true: put the',
        ),
        ({**worker(), "env": {False: "x"}}, 'env.false: the key is false; expected a text; YAML reads the words "off"'),
        (
            {**worker(), "env": {"A": "x"}, "secrets": {"A": "b/c"}},
            "specification: A is in env and in secrets; expected one of them",
        ),
        (worker(topology={"preferred": "a", "required": "b"}), "expected exactly one of preferred and required"),
        ({**worker(), "labels": {"a/b/c": "x"}}, 'labels.a/b/c: got "a/b/c"; expected a label key'),
        ({**worker(), "labels": {"acme.org/x": "?"}}, 'labels."acme.org/x": got "?"; expected a label value'),
        ({**worker(), "name": "a" * 64}, "expected at most 63 lowercase letters"),
        ({**worker(), "limits": {"active_deadline": "-3s"}}, "limits.active_deadline: got"),
        ({**worker(), "limits": {"active_deadline": float("inf")}}, "limits.active_deadline: got"),
        ({**worker(), "limits": {"active_deadline": "99999999999d"}}, "expected a duration such as 30s"),
        (
            {**worker(), "checkpoint": {"every": 5}},
            "checkpoint: has neither storage nor watch; expected the URL of a folder as storage, or a path as watch",
        ),
        (
            {**worker(nodes=1), "checkpoint": {"watch": "/saves"}},
            (
                "specification: checkpoint.watch is /saves without checkpoint.storage, and nodes is 1: the copies are "
                "in the memory of another node; set nodes to at least 2, or set checkpoint.storage"
            ),
        ),
        ({**worker(), "env": {"A": "x" * 20_000}}, "bytes as JSON; expected at most 16384"),
    ],
)
def test_text(data: object, text: str):
    assert text in text_of(data)


def test_nesting_without_end_is_a_problem_and_no_crash():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert "nested more than" in text_of({"name": "a", "roles": deep})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "name: a\noutputs: {logs: s3://x/${job.name}}\n",
            "got '{'; inside {…}, put a text with ${…} in quotes, such as {logs: \"s3://bucket/${job.name}\"}",
        ),
        ("a: 1\nb: 2\na: 3\n", 'not valid YAML at line 3, column 1: the key "a" is already on line 1; there: a: 3'),
        ("a:\n\t- b\n", r"not valid YAML at line 2, column 1: found character '\t' that cannot start any token; ind"),
        ("a: [1\nb: 2\n", "not valid YAML at line 2, column 2"),
        ("a: &x [*x]\n", "nested too deep"),
        ("[" * 1000 + "\n", "nested too deep"),
        ("---\na: 1\n---\nb: 1\n", "not valid YAML at line 3"),
        ("a: !!python/object:os.system x\n", "not valid YAML at line 1"),
        ("a: \x07\n", "not valid YAML"),
        ('{"name": "a", "name": "b"}', 'the key "name" is already on line 1'),
        (
            "z: &z 1\n" + "".join(f"{x}: &{x} [{', '.join([f'*{y}'] * 8)}]\n" for y, x in pairwise("zabcdef")),
            "more than 20000 values",
        ),
    ],
)
def test_syntax(text: str, message: str):
    with pytest.raises(SpecError) as caught:
        load_spec(text)
    assert message in str(caught.value)


def test_a_file_that_is_not_text_is_a_problem(tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="expected a text in UTF-8"):
        load_spec(path)


def test_a_file_that_does_not_exist_is_an_error_of_the_system(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        load_spec(tmp_path / "job.yaml")


def test_backend_problems_are_named_beside_others():
    with pytest.raises(SpecError) as caught:
        validate_spec({**worker(nodes=0, image="x"), "recovery": {"max_restarts": 2}})
    assert [problem.path for problem in caught.value.problems] == [
        "roles.worker.nodes",
        "recovery.max_restarts",
        "roles.worker.image",
    ]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"backend": "slurm"}, 'backend: got "slurm"; expected local, kubernetes, joined or ray'),
        ({"workdir": {"path": "/a", "git": "u"}}, "workdir.git: unknown field; expected one of path, exclude, archive"),
        ({"recovery": {"spares": 0}}, "recovery.spares: unknown field; expected one of on_capacity_loss, "),
        ({"notifications": []}, "notifications: got an empty list; expected a mapping"),
    ],
)
def test_what_an_earlier_release_had_is_refused_as_any_unknown_field_is(fields: dict[str, object], text: str):
    assert text in text_of({**worker(), **fields})


def test_paths_are_written_as_people_do():
    assert format_path(("volumes", 0, "mount_path")) == "volumes[0].mount_path"
    assert format_path(("labels", "acme.org/team")) == 'labels."acme.org/team"'
    assert str(SpecProblem(location=(), message="wrong")) == "specification: wrong"
