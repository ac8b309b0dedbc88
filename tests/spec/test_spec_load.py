from __future__ import annotations

from pathlib import Path

import pytest

from perdure.spec.errors import SpecError
from perdure.spec.job import Backend
from perdure.spec.load import load_spec, read_document, validate_file
from perdure.spec.validate import default_name, one_line_spec

MINIMAL = "name: a\nroles: {worker: {nodes: 2, command: [a]}}\n"


def test_scalars_mean_what_they_look_like():
    text = "a: 2:8\nb: on\nc: 1e-4\nd: 0777\ne: 2026-11-21\nf: true\ng: ~\nh: 0x1f\ni: -3\nj: .inf\nk: 1_000\nl:\n"
    assert read_document(text).data == {
        "a": "2:8",
        "b": "on",
        "c": 1e-4,
        "d": 777,
        "e": "2026-11-21",
        "f": True,
        "g": None,
        "h": 31,
        "i": -3,
        "j": float("inf"),
        "k": "1_000",
        "l": None,
    }


def test_an_unquoted_range_is_a_range():
    nodes = load_spec("name: a\nroles: {worker: {nodes: 2:8, command: [a]}}\n").roles["worker"].nodes
    assert (nodes.min, nodes.max) == (2, 8)


def test_json_with_tabs_and_surrogates_is_read_with_lines():
    document = read_document('{\n\t"name":\t"a",\n\t"env": {"A": "\\ud83d\\ude00", "B": "x\\/y"}\n}')
    assert document.data["env"] == {"A": "😀", "B": "x/y"}
    assert document.lines["env",] == 3


def test_relative_folders_count_from_the_file(tmp_path: Path):
    (tmp_path / "specs").mkdir()
    path = tmp_path / "specs" / "job.yaml"
    path.write_text(MINIMAL + "workdir: {path: ../code}\n")
    workdir = load_spec(path).workdir
    assert workdir is not None
    assert workdir.path == str(tmp_path / "code")


def test_the_file_s_folder_is_where_local_commands_run(tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_text(MINIMAL)
    workdir = load_spec(str(path)).workdir
    assert workdir is not None
    assert workdir.path == str(tmp_path)
    assert load_spec(path, overrides={"backend": "kubernetes"}).workdir is None


def test_a_relative_folder_without_a_file_is_refused():
    assert load_spec(MINIMAL).workdir is None
    with pytest.raises(SpecError, match=r'workdir.path: got "code"; expected an absolute path'):
        validate_file(MINIMAL + "workdir: {path: code}\n")


def test_overrides_replace_what_the_file_says():
    spec = load_spec(MINIMAL + "backend: ray\n", overrides={"backend": "local", "name": "b"})
    assert (spec.name, spec.backend) == ("b", Backend.LOCAL)
    with pytest.raises(SpecError) as caught:
        load_spec(MINIMAL, overrides={"name": "B"})
    assert [(problem.path, problem.line) for problem in caught.value.problems] == [("name", 1)]


def test_sections_without_a_value_are_left_out():
    assert load_spec(MINIMAL + "recovery:\nlimits:\n  queue_timeout:\nenv: ~\n") == load_spec(MINIMAL)


def test_one_line_is_enough(tmp_path: Path):
    spec = one_line_spec(
        command=["torchrun", "src/Train_Net.py", "--lr", "1e-4"],
        nodes="2:8",
        nproc_per_node="4",
        workdir=str(tmp_path),
        env={"A": "b"},
    )
    ((name, role),) = spec.roles.items()
    assert (spec.name, name, str(role.nodes), role.nproc_per_node) == ("train-net", "worker", "2:8", 4)
    assert role.command == ["torchrun", "src/Train_Net.py", "--lr", "1e-4"]
    assert one_line_spec(command=["a"], name="given").name == "given"
    with pytest.raises(SpecError, match=r"roles\.worker\.command: got an empty list"):
        one_line_spec(command=[])


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["torchrun", "train.py"], "train"),
        (["./__run__.sh"], "run"),
        (["python", "-m", "torch.distributed.run", "-m", "pkg"], "python"),
        (["a" * 60 + ".py"], "a" * 40),
        (["é"], "job"),
        ([], "job"),
    ],
)
def test_a_job_without_a_name_gets_its_script_s(command: list[str], name: str):
    assert default_name(command) == name


@pytest.mark.parametrize(
    "text",
    [
        "name: !!float abc\n",
        "name: !!float ''\n",
        "name: !!bool maybe\n",
        "name: !!timestamp 2026-99-99\n",
        "name: !!timestamp x\n",
        "name: !!set [a]\n",
        "name: !!map a\n",
        "name: !!int 0x\n",
        f"name: {'9' * 5000}\n",
        '{"name": ' + "9" * 5000 + "}",
        "name: !!python/object/apply:os.getcwd []\n",
        "name: &a [*a]\n",
    ],
)
def test_a_value_that_no_conversion_takes_is_an_error_of_the_file(text: str):
    with pytest.raises(SpecError):
        read_document(text)


def test_a_value_that_does_not_fit_its_tag_is_named_with_its_line():
    with pytest.raises(SpecError, match=r"line 2, column 8: the value does not fit its tag !!float"):
        read_document("name: a\nnodes: !!float x\n")
