"""Tests of the site's own certificate: shown to those who call the gateway by its name, and renewed while it serves."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from perdure.base.credentials.certificates import Authority
from perdure.base.credentials.names import GATEWAY_NAME
from perdure.gateway.certificates import CertificateInvalid, ServerCertificates, SiteCertificate
from tests.agent.harness import Workflows
from tests.gateway.site import GatewaySite
from tests.support.temporal_server import DevServer

NAME = "gateway.example.org"


class SiteAuthority:
    """An authority that has nothing to do with Perdure, with keys of another kind."""

    def __init__(self, folder: Path) -> None:
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Example authority")])
        self.files = SiteCertificate(certificate=folder / "tls.crt", private_key=folder / "tls.key")
        certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = certificate.public_bytes(serialization.Encoding.PEM).decode()

    def _builder(self, subject: x509.Name, key: rsa.RSAPublicKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
        )

    def write(self) -> int:
        """Writes a new certificate for the gateway, as a renewal does; returns its serial number."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
        certificate = (
            self._builder(name, key.public_key())
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        self.files.private_key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return certificate.serial_number


@pytest.fixture
def authority(tmp_path: Path) -> SiteAuthority:
    return SiteAuthority(tmp_path)


@pytest.fixture
async def site(temporal_server: DevServer, authority: SiteAuthority) -> AsyncIterator[GatewaySite]:
    """A gateway with a certificate of the site."""
    site = GatewaySite(temporal_server)
    authority.write()
    site.certificate = authority.files
    await site.start()
    yield site
    await site.stop()


async def shown(site: GatewaySite, name: str, trusted: str) -> int:
    """The serial number of the certificate that one is shown who asks for this name, and trusts this authority.

    Raises:
        SSLCertVerificationError: if the certificate is of another authority or for another name.
    """
    trust = ssl.create_default_context(cadata=trusted)
    host, _, port = site.address.partition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=trust, server_hostname=name)
    connection = writer.get_extra_info("ssl_object")
    content = connection.getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(content).serial_number


async def test_each_name_has_its_own_certificate(site: GatewaySite, authority: SiteAuthority) -> None:
    own = site.keyring.authority.certificate
    assert await shown(site, GATEWAY_NAME, own) != await shown(site, NAME, authority.certificate)
    # Who trusts one authority is not shown the other's certificate as valid.
    for name, trusted in ((GATEWAY_NAME, authority.certificate), (NAME, own)):
        with pytest.raises(ssl.SSLCertVerificationError):
            await shown(site, name, trusted)


async def test_a_renewed_certificate_is_used_and_a_broken_one_is_not(
    site: GatewaySite, authority: SiteAuthority
) -> None:
    first = await shown(site, NAME, authority.certificate)
    renewed = authority.write()
    assert await shown(site, NAME, authority.certificate) == renewed != first
    for content in (b"", b"no certificate", authority.certificate.encode()):
        authority.files.certificate.write_bytes(content)
        assert await shown(site, NAME, authority.certificate) == renewed
    authority.files.private_key.unlink()
    assert await shown(site, NAME, authority.certificate) == renewed
    again = authority.write()
    assert await shown(site, NAME, authority.certificate) == again
    await shown(site, GATEWAY_NAME, site.keyring.authority.certificate)


async def test_an_agent_trusts_the_sites_authority_where_its_configuration_has_it(
    site: GatewaySite, workflows: Workflows, authority: SiteAuthority, tmp_path_factory: pytest.TempPathFactory
) -> None:
    agent = site.agent(workflows, tmp_path_factory.mktemp("n"))
    assert agent.config.gateway
    trust = {"authority": authority.certificate, "server_name": NAME}
    agent.config = agent.config.model_copy(update={"gateway": agent.config.gateway.model_copy(update=trust)})
    await agent.start()
    try:
        await workflows.expect(workflows.group, "joined")
    finally:
        await agent.close()


def test_a_gateway_does_not_start_with_a_certificate_that_it_cannot_use(authority: SiteAuthority) -> None:
    own = Authority.new()
    with pytest.raises(CertificateInvalid, match="cannot be read"):
        ServerCertificates(own, authority.files)
    authority.write()
    key = authority.files.private_key.read_bytes()
    authority.write()
    authority.files.private_key.write_bytes(key)
    with pytest.raises(CertificateInvalid, match="is not the key of"):
        ServerCertificates(own, authority.files)
    authority.files.private_key.write_bytes(b"x")
    with pytest.raises(CertificateInvalid, match="is not a private key"):
        ServerCertificates(own, authority.files)
    authority.files.certificate.write_bytes(b"x")
    with pytest.raises(CertificateInvalid, match="is not a certificate"):
        ServerCertificates(own, authority.files)
