"""Tests of the codec server: what Temporal's own tools read with it, and that others read nothing."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from temporalio.api.failure.v1 import Failure
from temporalio.client import Client as Connection

from perdure.base.encryption.codec import PayloadEncryption
from perdure.base.encryption.codec_server import CodecAddress, codec_server
from perdure.base.encryption.keys import create_keys
from perdure.client.client import Client
from perdure.contract import JobPhase
from perdure.local.control_plane import LocalControlPlane
from tests.support.command_line import PERDURE, CommandLine
from tests.support.other_user import other_user
from tests.support.waiting import DEADLINE

UI = "http://127.0.0.1:8233"
PLAIN = {"payloads": [{"metadata": {"encoding": "anNvbi9wbGFpbg=="}, "data": "Imh1bnRlcjIi"}]}
"""The JSON text "hunter2"."""


@pytest.fixture
async def codec(tmp_path: Path) -> AsyncIterator[CodecAddress]:
    async with codec_server(PayloadEncryption.of(create_keys(tmp_path / "keys.json")), origins=[UI]) as address:
        yield address


async def ask(
    url: str, *, content: Any = PLAIN, method: str = "POST", **headers: str
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """The status, the JSON and the headers of an answer."""
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, data=json.dumps(content), headers=headers) as answer,
    ):
        text = await answer.text()
        return answer.status, json.loads(text) if text.startswith("{") else {}, dict(answer.headers)


async def test_who_has_the_token_encrypts_and_decrypts(codec: CodecAddress) -> None:
    status, encrypted, _ = await ask(f"{codec.endpoint}/encode", Authorization=codec.authorization)
    assert status == 200
    assert b"hunter2" not in b64decode(encrypted["payloads"][0]["data"])
    by_header = await ask(f"{codec.endpoint}/decode", content=encrypted, Authorization=codec.authorization)
    by_path = await ask(f"{codec.endpoint_with_token}/decode", content=encrypted)
    assert by_header[:2] == by_path[:2] == (200, PLAIN)


async def test_who_has_no_token_gets_nothing(codec: CodecAddress) -> None:
    for headers in ({}, {"Authorization": ""}, {"Authorization": "Bearer "}, {"Authorization": "Bearer made-up"}):
        for path in ("/decode", "/encode", "/made-up/decode", "//decode"):
            status, answer, _ = await ask(codec.endpoint + path, **headers)
            assert (status in (401, 404), answer) == (True, {})


@pytest.mark.parametrize(
    "headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "null"}], ids=str
)
async def test_a_foreign_page_gets_nothing_even_with_the_token(codec: CodecAddress, headers: dict[str, str]) -> None:
    for method in ("POST", "OPTIONS"):
        status, answer, answered = await ask(f"{codec.endpoint_with_token}/decode", method=method, **headers)
        assert (status, answer) == (403, {})
        assert "Access-Control-Allow-Origin" not in answered


async def test_the_pages_of_the_ui_may_ask(codec: CodecAddress) -> None:
    preflight = {"Origin": UI, "Access-Control-Request-Method": "POST"}
    status, _, allowed = await ask(f"{codec.endpoint_with_token}/decode", method="OPTIONS", **preflight)
    assert status == 204
    assert allowed["Access-Control-Allow-Origin"] == UI
    assert {"content-type", "x-namespace"} <= set(allowed["Access-Control-Allow-Headers"].lower().split(", "))
    status, answer, allowed = await ask(f"{codec.endpoint_with_token}/decode", Origin=UI)
    assert (status, answer, allowed["Access-Control-Allow-Origin"]) == (200, PLAIN, UI)
    status, _, _ = await ask(f"{codec.endpoint}/decode", Origin=UI)
    assert status == 401


async def test_what_cannot_be_decrypted_is_explained(codec: CodecAddress, tmp_path: Path) -> None:
    async with codec_server(PayloadEncryption.of(create_keys(tmp_path / "other.json"))) as other:
        _, encrypted, _ = await ask(f"{other.endpoint}/encode", Authorization=other.authorization)
    _, answer, _ = await ask(f"{codec.endpoint}/decode", content=encrypted, Authorization=codec.authorization)
    assert b"needs the key" in b64decode(answer["payloads"][0]["data"])
    status, _, _ = await ask(f"{codec.endpoint}/decode", content="no payloads", Authorization=codec.authorization)
    assert status == 400


@pytest.fixture
def command_line(control_plane: LocalControlPlane, tmp_path: Path) -> CommandLine:
    return CommandLine.local(tmp_path, control_plane.state.path)


@pytest.mark.long("commands")
async def test_temporals_command_line_starts_and_reads_jobs(
    control_plane: LocalControlPlane, command_line: CommandLine, job_name: str
) -> None:
    """The commands of docs/encryption.md."""
    password = f"hunter2-{secrets.token_hex(8)}"
    spec = {"name": job_name, "env": {"HF_TOKEN": password}, "roles": {"worker": {"nodes": 1, "command": ["true"]}}}
    command_line.write("job.json", json.dumps(spec))
    names = ("--type", "TrainingJob", "--task-queue", "perdure", "--workflow-id", f"job/default/{job_name}")
    with_codec = ("temporal", "workflow")
    started = command_line.run(*with_codec, "start", *names, "--input-file", "job.json")
    assert started.code == 0, started.err
    result = await Client(endpoint=await control_plane.ensure_server()).wait(job_name)
    assert result.phase is JobPhase.SUCCEEDED
    shown = command_line.run(*with_codec, "show", "--workflow-id", f"job/default/{job_name}", "--output", "json")
    data = [b64decode(found) for found in re.findall(r'"data": "([^"]*)"', shown.out)]
    assert password.encode() in b"".join(data)
    asked = command_line.run(*with_codec, "query", "--workflow-id", f"job/default/{job_name}", "--type", "status")
    assert "SUCCEEDED" in asked.out
    missing = command_line.run(*with_codec, "describe", "--workflow-id", "job/default/there-is-none")
    assert missing.code == 1, "the command's own exit code"


async def test_temporals_command_line_says_in_words_what_was_wrong_with_a_query(
    control_plane: LocalControlPlane, command_line: CommandLine, job_name: str
) -> None:
    client = Client(endpoint=await control_plane.ensure())
    await client.submit({"name": job_name, "roles": {"worker": {"nodes": 1, "command": ["true"]}}})
    await client.wait(job_name)
    query = ("temporal", "workflow", "query", "--workflow-id", f"job/default/{job_name}", "--type")
    unknown = command_line.run(*query, "statuss")
    assert unknown.code == 1
    assert "'statuss' expected but not found, known queries: [" in unknown.err
    assert "incidents machines nodes preview_scale status]" in unknown.err
    wrong = command_line.run(*query, "nodes", "--input", '"hunter2"')
    assert wrong.code == 1
    assert "Failed decoding arguments" in wrong.err
    assert "hunter2" not in wrong.err


@pytest.mark.parametrize("message", ["the token is hunter2", "Failed decoding arguments: hunter2"])
def test_messages_of_failures_are_encrypted(message: str, tmp_path: Path) -> None:
    converter = PayloadEncryption.of(create_keys(tmp_path / "keys.json")).data_converter
    failure = Failure()
    converter.failure_converter.to_failure(RuntimeError(message), converter.payload_converter, failure)
    assert "hunter2" not in failure.message
    assert "perdure explain" in failure.message
    assert message in str(converter.failure_converter.from_failure(failure, converter.payload_converter))


async def test_a_command_and_what_it_runs_find_temporals_command_line(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join(("/usr/bin", "/bin")))
    assert shutil.which("temporal") is None
    for command in (
        ("temporal",),
        ("codec-server", "--", "temporal"),
        ("codec-server", "--", "sh", "-c", 'temporal "$@"', "x"),
    ):
        done = command_line.run(*command, "workflow", "list", "--limit", "1", "--output", "json")
        assert done.code == 0, (command, done.out, done.err)
        assert isinstance(done.json, list)
    nowhere = CommandLine.local(command_line.folder, command_line.folder / "no-state")
    helped = nowhere.run("temporal", "workflow", "--help")
    assert (helped.code, "temporal workflow [command]" in helped.out) == (0, True)
    assert "no Temporal server" in helped.err


@pytest.fixture
def serving(command_line: CommandLine) -> Iterator[subprocess.Popen[str]]:
    """The command, in a new interpreter: what others see of it is the kernel's."""
    environment = {**os.environ, **command_line.environment}
    process = subprocess.Popen([*PERDURE, "codec-server"], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=DEADLINE) == 0


async def test_another_user_reads_nothing_through_a_codec_server(
    control_plane: LocalControlPlane, serving: subprocess.Popen[str]
) -> None:
    server = control_plane.status().server
    assert server is not None
    temporal = await Connection.connect(server.address)
    started = await temporal.start_workflow(
        "NotThere", "an argument", id=f"not-there-{secrets.token_hex(4)}", task_queue=secrets.token_hex(8)
    )
    assert serving.stdout is not None
    try:
        endpoint, token = serving.stdout.readline().split(": ")[1].strip().rsplit("/", 1)
        with other_user(server.address) as attacker:
            seen = attacker.run("ps", "-Awwo", "args").out
            assert "codec-server" in seen
            assert token not in seen
            words = ("workflow", "show", "--workflow-id", started.id)
            with_codec = {"TEMPORAL_CODEC_ENDPOINT": endpoint, "TEMPORAL_CODEC_AUTH": "Bearer made-up"}
            refused = attacker.temporal(*words, within="3s", **with_codec)
            assert refused.code == 1
            assert "WorkflowExecutionStarted" not in refused.out
            assert "WorkflowExecutionStarted" in attacker.temporal(*words).out
    finally:
        await started.terminate()


@pytest.mark.usefixtures("root")
def test_another_user_reads_no_environment_of_a_codec_server(
    control_plane: LocalControlPlane, serving: subprocess.Popen[str]
) -> None:
    assert serving.stdout is not None
    assert serving.stdout.readline()
    server = control_plane.status().server
    assert server is not None
    with other_user(server.address) as attacker:
        environment = attacker.run("cat", f"/proc/{serving.pid}/environ")
    assert (environment.code, environment.out) == (1, "")


async def test_a_command_gets_the_token_by_its_environment_only(command_line: CommandLine) -> None:
    look = (
        "import json, os, psutil\n"
        "lines = [' '.join(one.info['cmdline'] or ()) for one in psutil.process_iter(['cmdline'])]\n"
        "print(json.dumps([os.environ['TEMPORAL_CODEC_AUTH'], os.environ['TEMPORAL_ADDRESS'], lines]))\n"
    )
    done = command_line.run("codec-server", "--", sys.executable, "-c", look)
    assert done.code == 0, done.err
    authorization, address, lines = done.json
    assert address
    token = authorization.removeprefix("Bearer ")
    assert len(token) > 40
    assert not [line for line in lines if token in line]


def test_the_command_makes_and_rotates_keys_and_prints_none(tmp_path: Path) -> None:
    line = CommandLine(tmp_path)
    made = line.run("payload-keys", "keys.json")
    assert made.code == 0
    assert "keys.json: 1 key" in made.out
    assert line.run("payload-keys", "keys.json").out == made.out, "it exists"
    rotated = line.run("payload-keys", "keys.json", "--rotate")
    assert "keys.json: 2 keys" in rotated.out
    content = json.loads((tmp_path / "keys.json").read_text())
    assert [key["id"] in rotated.out for key in content["keys"]] == [True, True]
    assert not [key for key in content["keys"] if key["secret"] in made.out + rotated.out + rotated.err]
    (tmp_path / "keys.json").chmod(0o644)
    refused = line.run("payload-keys", "keys.json", "--rotate")
    assert (refused.code, "chmod 600" in refused.err) == (2, True)
