"""Tests of credentials that expire while a worker or an operator outside of a cluster runs."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.utils import Backoff

from perdure.base import kubernetes as api_module
from perdure.base import kubernetes_credentials as credentials_module
from perdure.base.kubernetes import KubernetesApi
from perdure.base.kubernetes_errors import KubernetesError
from tests.support.played_api import played_server, refusal, write_kubeconfig
from tests.support.ports import free_port

PODS = "/api/v1/namespaces/nlp/pods"
_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)
PLUGIN = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
with (folder / "calls").open("a") as calls:
    calls.write("called\\n")
credential = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
print(json.dumps({**credential, "status": json.loads((folder / "status").read_text())}))
"""


class Certificate:
    """A certificate for 127.0.0.1 with its key, signed by another one or by itself."""

    def __init__(self, name: str, *, by: Certificate | None = None) -> None:
        self._private = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer = by or self
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(issuer._name)
            .public_key(self._private.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=by is None, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._private.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer._private.public_key()), critical=False
            )
        )
        if by is None:
            usages = dict.fromkeys(_USAGES, False) | {"key_cert_sign": True, "digital_signature": True}
            builder = builder.add_extension(x509.KeyUsage(**usages), critical=True)
        signed = builder.sign(issuer._private, hashes.SHA256())
        self.certificate = signed.public_bytes(serialization.Encoding.PEM).decode()
        self.key = self._private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode()

    def write(self, path: Path) -> Path:
        path.write_text(self.certificate + self.key)
        return path


class Site:
    """A server that accepts one token, or the certificate of one client, and a kubeconfig whose program returns what a
    file has."""

    def __init__(self, folder: Path) -> None:
        self.accepted = "first"
        self._folder = folder
        self.offer("first")
        self.kubeconfig = folder / "kubeconfig"
        (folder / "plugin.py").write_text(PLUGIN)

    def offer(self, token: str) -> None:
        (self._folder / "status").write_text(json.dumps({"token": token}))

    def offer_certificate(self, made: Certificate) -> None:
        status = {"clientCertificateData": made.certificate, "clientKeyData": made.key}
        (self._folder / "status").write_text(json.dumps(status))

    @property
    def calls(self) -> int:
        return len((self._folder / "calls").read_text().splitlines())

    async def answer(self, request: web.Request) -> web.StreamResponse:
        assert request.transport
        peer = request.transport.get_extra_info("peercert") or {}
        names = [value for part in peer.get("subject", ()) for kind, value in part if kind == "commonName"]
        if request.headers.get("Authorization") != f"Bearer {self.accepted}" and self.accepted not in names:
            return refusal(401, "Unauthorized", "Unauthorized")
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})

    def write_kubeconfig(self, server: str, *, authority: Path | None = None) -> None:
        program = {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": sys.executable,
            "args": [str(self._folder / "plugin.py"), str(self._folder)],
            "interactiveMode": "Never",
        }
        write_kubeconfig(self.kubeconfig, server, authority=authority, exec=program)


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(api_module, "_RETRIES", Backoff(steps=3, duration=0.01, factor=1.0))
    made = Site(tmp_path)
    async with played_server(made.answer) as server:
        made.write_kubeconfig(server)
        yield made


async def test_a_token_that_expires_is_requested_again_once_for_all_requests(site: Site) -> None:
    api = await KubernetesApi.connect(str(site.kubeconfig))
    try:
        assert await api.list(PODS) == []
        site.accepted = "second"
        site.offer("second")
        assert await asyncio.gather(*(api.list(PODS) for _ in range(8))) == [[]] * 8
    finally:
        await api.close()
    assert site.calls == 2


async def test_a_token_that_expires_fails_no_request_that_insists_on_no_right(site: Site) -> None:
    api = await KubernetesApi.connect(str(site.kubeconfig))
    try:
        site.accepted = "second"
        site.offer("second")
        assert await api.list(PODS, insist=False) == []
    finally:
        await api.close()


async def test_a_refusal_of_good_credentials_starts_no_storm_of_programs(site: Site) -> None:
    api = await KubernetesApi.connect(str(site.kubeconfig))
    site.accepted = "none that the program has"
    try:
        answers = await asyncio.gather(*(api.list(PODS) for _ in range(8)), return_exceptions=True)
    finally:
        await api.close()
    assert all(isinstance(answer, KubernetesError) and answer.status == 401 for answer in answers)
    assert site.calls == 2


async def test_a_kubeconfig_that_cannot_be_read_again_leaves_the_refusal(site: Site) -> None:
    api = await KubernetesApi.connect(str(site.kubeconfig))
    site.accepted = "second"
    site.kubeconfig.write_text("{half: ")
    try:
        with pytest.raises(KubernetesError, match="Unauthorized"):
            await api.list(PODS)
    finally:
        await api.close()


async def test_a_certificate_that_expires_is_requested_again_once_for_all_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "_RETRIES", Backoff(steps=3, duration=0.01, factor=1.0))
    authority = Certificate("authority")
    trusted = authority.write(tmp_path / "authority.pem")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(trusted))
    tls.load_cert_chain(Certificate("server", by=authority).write(tmp_path / "server.pem"))
    tls.verify_mode = ssl.CERT_OPTIONAL
    site = Site(tmp_path)
    site.offer_certificate(Certificate("first", by=authority))
    async with played_server(site.answer, tls=tls) as server:
        site.write_kubeconfig(server, authority=trusted)
        api = await KubernetesApi.connect(str(site.kubeconfig))
        try:
            for name in ("second", "third"):
                assert await api.list(PODS) == [], "it has a connection with the certificate before"
                monkeypatch.setattr(credentials_module, "_RENEWALS_APART", 0.0)
                site.accepted = name
                site.offer_certificate(Certificate(name, by=authority))
                assert await asyncio.gather(*(api.list(PODS) for _ in range(8))) == [[]] * 8
        finally:
            await api.close()
    assert site.calls == 3


def tls_of(authority: Certificate, folder: Path) -> ssl.SSLContext:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(Certificate("server", by=authority).write(folder / "server.pem"))
    return tls


@pytest.mark.parametrize("in_cluster", [False, True], ids=["kubeconfig", "in a pod"])
async def test_an_authority_that_is_renewed_is_trusted_without_a_restart(
    in_cluster: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "_RETRIES", Backoff(steps=3, duration=0.01, factor=1.0))
    monkeypatch.setattr(credentials_module, "_RENEWALS_APART", 0.0)
    before, after = Certificate("authority"), Certificate("renewed authority")
    trusted, site, port = before.write(tmp_path / "authority.pem"), Site(tmp_path), free_port()
    async with played_server(site.answer, tls=tls_of(before, tmp_path), port=port) as server:
        site.write_kubeconfig(server, authority=trusted)
        if in_cluster:
            configuration = Configuration()
            configuration.host, configuration.ssl_ca_cert = server, str(trusted)
            configuration.api_key = {"BearerToken": "Bearer first"}
            api = KubernetesApi(configuration)
        else:
            api = await KubernetesApi.connect(str(site.kubeconfig))
        assert await api.list(PODS) == []
    try:
        async with played_server(site.answer, tls=tls_of(after, tmp_path), port=port):
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await api.list(PODS)
            after.write(trusted)
            assert await api.list(PODS) == []
    finally:
        await api.close()
