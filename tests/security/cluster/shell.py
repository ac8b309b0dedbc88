"""What an attacker with a shell in a training container tries, as a program: it prints one line of JSON.

It runs with this machine's Python, gRPC and Temporal SDK, and as root: more than an image gives training code.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import sys
from pathlib import Path

import grpc

SECRET_WORDS = (b'"token"', b'"grant"', b"PRIVATE KEY", b"eyJhbGciOi")
METADATA = ("169.254.169.254", 80)
SERVICE = "/temporal.api.workflowservice.v1.WorkflowService/"


def main() -> None:
    api_server, authority, kubelets = sys.argv[1], Path(sys.argv[2]).read_bytes(), sys.argv[3:]
    gateway = sorted(remote for remote in connections() if remote.split(":")[0] == api_server)
    print(
        json.dumps(
            {
                "temporal variables": [name for name in os.environ if name.startswith("TEMPORAL")],
                "secrets in files": sorted(secrets_in_files()),
                "agents' files": [
                    str(path) for path in map(Path, ("/perdure-agent", "/perdure-token")) if path.exists()
                ],
                "others' processes": sorted(others()),
                "gateway": {address: [speaks(address), *calls(address, authority)] for address in gateway},
                "metadata": dials(METADATA),
                "api server": asks(f"https://{api_server}/api/v1/namespaces"),
                "kubelets": [asks(f"https://{kubelet}:10250/pods") for kubelet in kubelets],
            }
        ),
        flush=True,
    )


def connections() -> set[str]:
    """The remote ends of connections in this pod's network namespace: that of the agent is among them."""
    found: set[str] = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        address, port = line.split()[2].split(":")
        found.add(f"{socket.inet_ntoa(bytes.fromhex(address)[::-1])}:{int(port, 16)}")
    return found


def secrets_in_files() -> set[str]:
    """Files below the shared folders that hold a token, a grant or a key."""
    found: set[str] = set()
    for folder in ("/perdure", "/var/run/secrets", "/run/secrets", "/perdure-agent", "/perdure-token"):
        for path in Path(folder).rglob("*"):
            try:
                content = path.read_bytes() if path.is_file() else b""
            except OSError:
                continue
            if "/lib/" not in str(path) and any(word in content for word in SECRET_WORDS):
                found.add(str(path))
    return found


def others() -> set[str]:
    """Processes of other containers."""
    commands: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if "-m perdure.agent" in command:
            commands.add(command)
    return commands


def speaks(address: str) -> str:
    host, _, port = address.partition(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, int(port)), timeout=5) as raw, context.wrap_socket(raw) as wrapped:
            return wrapped.version() or ""
    except OSError as error:
        return str(error)


def calls(address: str, authority: bytes) -> list[str]:
    """What the gateway answers to one who trusts it and has no proofs."""
    options = [("grpc.ssl_target_name_override", "perdure-gateway.internal")]
    answers: list[str] = []
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(authority), options=options) as channel:
        for method in ("ListWorkflowExecutions", "SignalWorkflowExecution", "PollActivityTaskQueue"):
            try:
                channel.unary_unary(SERVICE + method)(b"", timeout=5)
                answers.append("OK")
            except grpc.RpcError as error:
                answers.append(error.code().name)
    return answers


def dials(address: tuple[str, int]) -> str:
    try:
        socket.create_connection(address, timeout=3).close()
    except OSError as error:
        return type(error).__name__
    return "connected"


def asks(url: str) -> int | str:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(url, context=context, timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError as error:
        return str(error)


if __name__ == "__main__":
    main()
