"""Tests of secrets off Kubernetes: the command gets the value, and nothing else does."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import subprocess
from base64 import b64decode
from pathlib import Path

import psutil
import pytest
import yaml

from perdure.base.errors import SecretUnavailable
from perdure.base.secret_store import SecretStore
from perdure.contract import JobPhase
from perdure.local.control_plane import LocalControlPlane
from tests.support.command_line import PERDURE, CommandLine
from tests.system.site import Job, Site

WAIT = """
import hashlib, os, sys, time
from perdure_training import report
report(step=1)
with open(sys.argv[1] + "/digest", "w") as file:
    file.write(hashlib.sha256(os.environ["HF_TOKEN"].encode()).hexdigest())
while not os.path.exists(sys.argv[1] + "/finish"):
    time.sleep(0.1)
"""


@pytest.fixture
def value() -> str:
    return f"hunter2-{secrets.token_hex(16)}"


@pytest.fixture
def line(control_plane: LocalControlPlane, tmp_path: Path) -> CommandLine:
    return CommandLine.local(tmp_path, control_plane.state.path)


def store(line: CommandLine, reference: str, value: str) -> None:
    terminal = line.on_terminal("secret", "set", reference)
    terminal.expect(f"value of {reference}:")
    terminal.press(f"{value}\n")
    assert terminal.leave() == 0
    assert value not in terminal.raw, "a terminal does not show what is typed"


def store_from_a_pipe(line: CommandLine, reference: str, value: str) -> None:
    done = subprocess.run(
        [*PERDURE, "secret", "set", reference],
        env={**os.environ, **line.environment},
        input=f"{value}\n",
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert value not in done.stdout + done.stderr


def digest_of(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


def histories(line: CommandLine, *workflow_ids: str) -> bytes:
    """Everything in the histories, decrypted."""
    shown = [
        line.run("codec-server", "--", "temporal", "workflow", "show", "-w", workflow_id, "-o", "json").out
        for workflow_id in workflow_ids
    ]
    data = [b64decode(found) for text in shown for found in re.findall(r'"data": "([^"]*)"', text)]
    return b"".join([*data, *(text.encode() for text in shown)])


def everything_printed(line: CommandLine, job: Job) -> str:
    commands = [[name, job.name] for name in ("status", "nodes", "explain")] + [["logs", job.name, "--all"]]
    done = [line.run(*command, *(["-o", "json"] if command[0] != "logs" else [])) for command in commands]
    return "".join(one.out + one.err for one in done)


async def test_a_command_gets_the_value_and_nothing_else_does(site: Site, line: CommandLine, value: str) -> None:
    reference = f"hf-{secrets.token_hex(3)}/token"
    store(line, reference, value)
    script = site.folder / "wait.py"
    script.write_text(WAIT)
    job = await site.submit(script=script, nodes="1", secrets={"HF_TOKEN": reference}, recovery={"warm_starts": False})
    known = await job.running(nodes=1)
    assert (job.out / "digest").read_text() == digest_of(value)
    command_lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert [text for text in command_lines if "wait.py" in text]
    assert not [text for text in command_lines if value in text]
    (agent,) = job.processes(kind="agent")
    assert value not in str(agent.environ()), "the agent needs it not"
    assert value not in everything_printed(line, job)
    history = histories(line, job.workflow_id, *known.groups)
    assert reference.encode() in history
    assert value.encode() not in history
    job.finish()
    assert (await site.client.wait(job.name)).phase is JobPhase.SUCCEEDED
    own = SecretStore(site.state.path / "secrets")
    holding = [path for path in site.state.path.rglob("*") if path.is_file() and value.encode() in path.read_bytes()]
    assert holding == [own.path / reference]
    assert stat.S_IMODE(holding[0].stat().st_mode) == 0o600
    assert stat.S_IMODE(own.path.stat().st_mode) == stat.S_IMODE(holding[0].parent.stat().st_mode) == 0o700


async def test_a_missing_secret_fails_the_job_once_with_the_remedy(site: Site) -> None:
    job = await site.submit(command=["true"], nodes="1", secrets={"HF_TOKEN": "there-is/none"})
    result = await site.client.wait(job.name)
    assert result.phase is JobPhase.FAILED
    assert "secrets.HF_TOKEN: the secret there-is/none is not on this machine" in result.reason
    assert "perdure secret set there-is/none" in result.reason


@pytest.mark.long("joining")
async def test_a_machine_that_joins_uses_its_own_secret(
    site: Site, line: CommandLine, tmp_path: Path, value: str, job_name: str
) -> None:
    """It reads the folder that `PERDURE_SECRETS` names, as a mounted Secret is one."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "finish").touch()
    (tmp_path / "mounted" / "hf").mkdir(parents=True)
    (tmp_path / "mounted" / "hf" / "token").write_text(value)
    script = tmp_path / "wait.py"
    script.write_text(WAIT)
    role = {"nodes": 1, "command": [PERDURE[0], str(script), str(out)]}
    line.write(
        "job.yaml", yaml.safe_dump({"name": "x", "secrets": {"HF_TOKEN": "hf/token"}, "roles": {"worker": role}})
    )
    join = ("join", job_name, "--spec", "job.yaml", "--address", site.client.endpoint.address)
    elsewhere = {**line.environment, "PERDURE_SECRETS": str(tmp_path / "mounted")}
    joined = CommandLine(tmp_path, elsewhere).run(*join)
    assert joined.code == 0, joined.err
    assert (out / "digest").read_text() == digest_of(value)
    assert value not in joined.out + joined.err


async def test_a_machine_that_joins_without_the_secret_says_what_to_do(
    site: Site, line: CommandLine, tmp_path: Path, job_name: str
) -> None:
    role = {"nodes": 1, "command": ["true"]}
    line.write("job.yaml", yaml.safe_dump({"name": "x", "secrets": {"A": "there-is/none"}, "roles": {"worker": role}}))
    joined = line.run("join", job_name, "--spec", "job.yaml")
    assert joined.code == 2
    assert "secrets.A: the secret there-is/none is not on this machine" in joined.err
    assert "perdure secret set there-is/none" in joined.err
    await site.client.cancel(job_name)


def test_secrets_are_listed_and_removed_and_never_shown(tmp_path: Path, value: str) -> None:
    line = CommandLine(tmp_path, {"PERDURE_STATE": str(tmp_path / "state")})
    assert "no secrets" in line.run("secret", "list").out
    store_from_a_pipe(line, "hf/token", value)
    store(line, "db/password", value)
    store(line, "hf/token", f"{value}2")
    assert line.run("secret", "list").out.split() == ["db/password", "hf/token"]
    assert line.run("secret", "list", "-o", "json").json == ["db/password", "hf/token"]
    assert SecretStore(tmp_path / "state" / "secrets").read("hf/token") == f"{value}2"
    assert "is removed" in line.run("secret", "remove", "hf/token").out
    assert "there was no" in line.run("secret", "remove", "hf/token").out
    assert line.run("secret", "list").out.split() == ["db/password"]
    for wrong in (("set",), ("list", "hf/token"), ("remove", "token"), ("show", "db/password")):
        assert line.run("secret", *wrong).code == 2


def test_a_terminal_does_not_show_what_is_typed(tmp_path: Path, value: str) -> None:
    store(CommandLine(tmp_path, {"PERDURE_STATE": str(tmp_path / "state")}), "hf/token", value)
    assert SecretStore(tmp_path / "state" / "secrets").read("hf/token") == value


@pytest.mark.parametrize("reference", ["token", "/etc/passwd", "hf/..", "../x", "hf/a/b", "hf/", "HF/token", "hf/a b"])
def test_no_other_file_is_read(tmp_path: Path, reference: str) -> None:
    with pytest.raises(SecretUnavailable, match="does not name a secret"):
        SecretStore(tmp_path).read(reference)


def test_what_others_may_read_is_refused(tmp_path: Path) -> None:
    own = SecretStore(tmp_path / "secrets")
    own.write("hf/token", b"hunter2")
    (own.path / "hf" / "token").chmod(0o640)
    with pytest.raises(SecretUnavailable, match="other users may read") as refused:
        own.read("hf/token")
    assert "hunter2" not in f"{refused.value} {refused.value.remedy}"


@pytest.mark.parametrize("content", [b"a\0b", b"\xff", b"x" * 200_000], ids=["nul", "binary", "long"])
def test_what_can_be_no_variable_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(SecretUnavailable, match="cannot be an environment variable"):
        SecretStore(tmp_path / "secrets").write("hf/token", content)
