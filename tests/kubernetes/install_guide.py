"""The commands of docs/install-kubernetes.md, which a test and a benchmark run as they are printed, except where the
machine's own cluster differs: it has no registry, and Temporal runs beside it, behind mutual TLS."""

from __future__ import annotations

import asyncio
import base64
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from scripts.cluster.certificates import Certificates
from scripts.cluster.host_programs import SITE_POLICY
from tests.docs.commands import typed_lines
from tests.docs.pages import PAGES

[GUIDE] = [page for page in PAGES if page.name == "docs/install-kubernetes.md"]
ELSEWHERE = re.compile(r"kubectl create namespace|kubectl port-forward|export ")
"""Commands for which something else stands: the test has made its namespaces, Temporal is no Service here, and the
test sets the variables of commands."""


def printed() -> list[str]:
    """The commands of the guide's steps 3 and 4, in order."""
    lines = [text for block in GUIDE.blocks for _, text in typed_lines(block)]
    first = lines.index("kubectl create namespace nlp")
    last = next(index for index, text in enumerate(lines) if text.startswith("perdure explain"))
    return [text for text in lines[first : last + 1] if not ELSEWHERE.match(text)]


class CommandFailed(Exception):
    """A command failed; the message has its output."""


class Shell:
    """Runs printed commands with the names of the test's namespaces."""

    def __init__(self, folder: Path, environment: Mapping[str, str], names: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = environment
        self._names = names

    async def run(self, text: str, *more: str) -> str:
        """Returns the output of a printed command with further arguments.

        Raises:
            CommandFailed: if it fails.
        """
        for word, name in self._names.items():
            text = re.sub(rf"(--namespace |jobNamespaces='\{{){word}\b", rf"\g<1>{name}", text)
        words = [*shlex.split(text), *more]
        process = await asyncio.create_subprocess_exec(
            *words,
            cwd=self._folder,
            env=self._environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            out, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise CommandFailed(f"{shlex.join(words)}:\n{out.decode()}")
        return out.decode()


def connection_secret(certificates: Certificates) -> dict[str, Any]:
    """The Secret that `temporal.secret` names."""
    certificate, key = certificates.issue("perdure", user="perdure")
    files = {"CLIENT_CERT": certificate, "CLIENT_KEY": key, "SERVER_CA_CERT": certificates.authority}
    data = {f"TEMPORAL_TLS_{kind}_DATA": base64.b64encode(path.read_bytes()).decode() for kind, path in files.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "temporal"}, "data": data}


def variables(certificates: Certificates, address: str) -> dict[str, str]:
    """The variables of a user's commands."""
    certificate, key = certificates.issue("user", user="user")
    return {
        "TEMPORAL_ADDRESS": address,
        "TEMPORAL_NAMESPACE": "nlp",
        "TEMPORAL_TLS_SERVER_NAME": "temporal-frontend",
        "TEMPORAL_TLS_SERVER_CA_CERT_PATH": str(certificates.authority),
        "TEMPORAL_TLS_CLIENT_CERT_PATH": str(certificate),
        "TEMPORAL_TLS_CLIENT_KEY_PATH": str(key),
    }


def differences(image: str, address: str, gateway: str, folder: Path) -> list[str]:
    """Options of `helm install` for what the machine's own cluster has not: a registry, Services, and CPU to spare."""
    small = {"resources": {"requests": {"cpu": "50m", "memory": "128Mi"}}}
    repository, _, tag = image.rpartition(":")
    values = {
        "image": {"tag": tag, "pullPolicy": "Never"},
        "temporal": {"address": address},
        "gateway": {"address": gateway, **small},
        **small,
        "sitePolicy": yaml.safe_load(SITE_POLICY),
    }
    path = folder / "differences.yaml"
    path.write_text(yaml.safe_dump(values))
    return ["--values", str(path), "--set", f"image.repository={repository}", "--timeout", "3m"]
