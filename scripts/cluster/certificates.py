"""Certificates that identify each client of the cluster; RBAC depends on them."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_DAYS = "30"


class Certificates:
    """A certificate authority in a folder, with the certificates that it has signed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.authority = folder / "ca.crt"
        self.service_account_key = folder / "service-accounts.key"

    def create(self) -> None:
        """Creates the authority, and the key that signs service accounts' tokens."""
        self._folder.mkdir(mode=0o700, parents=True)
        self._request("ca", "/CN=perdure-cluster", extra=["-addext", "basicConstraints=critical,CA:TRUE"], signed=False)
        _openssl("genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", self.service_account_key)

    def issue(
        self, name: str, *, user: str, groups: Sequence[str] = (), hosts: Sequence[str] = ()
    ) -> tuple[Path, Path]:
        """Issues a certificate; returns its path and its key's path.

        Args:
            name: the files' name.
            user: the name of the user or server.
            groups: the groups that the API server assigns to the user.
            hosts: names and addresses of a server, as `DNS:name` or `IP:address`.
        """
        subject = "".join(f"/O={group}" for group in groups) + f"/CN={user}"
        extra = ["-addext", "basicConstraints=critical,CA:FALSE"]
        extra += ["-addext", f"subjectAltName={','.join(hosts)}"] if hosts else []
        return self._request(name, subject, extra=extra, signed=True)

    def kubeconfig(self, name: str, *, server: str, user: str, groups: Sequence[str] = ()) -> Path:
        """Writes a kubeconfig with which clients access the cluster as this user."""
        certificate, key = self.issue(name, user=user, groups=groups)
        content: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "perdure",
                    "cluster": {"server": server, "certificate-authority-data": _encode(self.authority)},
                }
            ],
            "users": [
                {
                    "name": user,
                    "user": {"client-certificate-data": _encode(certificate), "client-key-data": _encode(key)},
                }
            ],
            "contexts": [{"name": "perdure", "context": {"cluster": "perdure", "user": user}}],
            "current-context": "perdure",
        }
        path = self._folder / f"{name}.kubeconfig"
        path.touch(mode=0o600)
        # JSON is YAML.
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")
        return path

    def _request(self, name: str, subject: str, *, extra: Sequence[str], signed: bool) -> tuple[Path, Path]:
        certificate, key = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        signer = ["-CA", self.authority, "-CAkey", self._folder / "ca.key"] if signed else []
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", _DAYS, "-subj", subject, "-keyout", key, "-out", certificate),
            *signer,
            *extra,
        )
        return certificate, key


def _openssl(*arguments: str | Path) -> None:
    answer = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False)
    if answer.returncode:
        raise RuntimeError(f"openssl {arguments[0]} failed: {answer.stderr.strip()}")


def _encode(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
