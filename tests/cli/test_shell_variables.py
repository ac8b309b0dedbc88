"""Tests of the variables that `perdure run` passes on from the calling shell, whatever that shell has."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import typer
from temporalio.envconfig import ClientConfig

from perdure.base.text_variables import text_variables
from perdure.cli.shell_variables import MOST_BYTES, shell_environment
from perdure.client.connection import load_profile
from perdure.spec.errors import SpecError
from perdure.spec.validate import MAX_BYTES, one_line_spec, parse_spec

BYTES = os.fsdecode(b"M\xfcnchen")
OWN = str(Path(sys.executable).parent)


def passed(shell: dict[str, str], *assignments: str) -> tuple[dict[str, str], list[str]]:
    said: list[str] = []
    return shell_environment(assignments, say=said.append, shell=shell), said


def folders(count: int) -> str:
    return ":".join(f"/opt/sw/spack/linux-rocky9-zen4/package-{number:05}/lib" for number in range(count))


def test_commands_get_what_they_need_of_the_shell_and_what_is_requested():
    found, said = passed(
        {"PATH": "/bin", "NCCL_DEBUG": "INFO", "TOKEN": "x", "HOME": "/root", "OMP_X": ""}, "HOME", "A=b=c"
    )
    assert found == {"PATH": f"/bin:{OWN}", "NCCL_DEBUG": "INFO", "HOME": "/root", "A": "b=c"}
    assert not said
    with pytest.raises(typer.BadParameter, match="NONE is not set here"):
        passed({}, "NONE")


def test_what_is_no_text_is_named_and_left_out():
    shell = {"NCCL_SITE": BYTES, "SITE": BYTES, f"CUDA_{BYTES}": "x", "PYTHONPATH": f"/a:/{BYTES}:/b", "PATH": "/bin"}
    found, said = passed(shell, "SITE")
    assert found == {"PATH": f"/bin:{OWN}", "PYTHONPATH": "/a:/b"}
    assert [line.partition(" is left out")[0] for line in said] == [
        "NCCL_SITE",
        "CUDA_M\ufffdnchen",
        "a part of PYTHONPATH",
        "SITE",
    ]


def test_an_environment_of_any_size_makes_a_specification():
    shell = {
        "PATH": f"/bin:{folders(900)}",
        "LD_LIBRARY_PATH": folders(700),
        "NCCL_TOPO": "x" * 40_000,
        "OMP_PLACES": "cores",
    }
    found, said = passed(shell)
    assert found["OMP_PLACES"] == "cores"
    assert "NCCL_TOPO" not in found
    assert found["PATH"].startswith("/bin:/opt/sw/spack/linux-rocky9-zen4/package-00000/lib:")
    assert found["PATH"].endswith(f":{OWN}")
    assert shell["LD_LIBRARY_PATH"].startswith(found["LD_LIBRARY_PATH"])
    assert found["LD_LIBRARY_PATH"].count(":") > 20
    assert len(said) == 3
    assert any("of the 700 folders in LD_LIBRARY_PATH are left out: with 34,999 characters" in line for line in said)
    assert any(line.startswith("NCCL_TOPO is left out") for line in said)
    spec = one_line_spec(
        command=["torchrun", "train.py"], name="a", nodes=1, nproc_per_node=None, namespace="b", workdir="/", env=found
    )
    assert MOST_BYTES / 2 < len(spec.model_dump_json(exclude_defaults=True)) < MAX_BYTES


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("env", {"LONG": "x" * MAX_BYTES, "B": "y"}, "the longest is env.LONG, of 16,384 characters"),
        ("env", {"A": BYTES}, "env.A: has bytes that are no UTF-8"),
        ("env", {BYTES: "a"}, "env: has bytes that are no UTF-8"),
    ],
)
def test_what_a_specification_cannot_hold_is_named(field: str, value: object, says: str):
    with pytest.raises(SpecError) as refused:
        parse_spec({"name": "a", "roles": {"worker": {"nodes": 1, "command": ["true"]}}, field: value})
    assert says in str(refused.value)


def test_commands_connect_whatever_bytes_a_variable_has(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LESS_TERMCAP_mb", BYTES)
    monkeypatch.setenv("TEMPORAL_ADDRESS", "there:7233")
    assert load_profile().address == "there:7233"
    connection = ClientConfig.load_client_connect_config(override_env_vars=text_variables())
    assert connection.get("target_host") == "there:7233"
