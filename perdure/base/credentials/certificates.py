"""Certificates of the gateway: an authority that is Perdure's own, and short-lived certificates that it issues.

Agents trust this authority only, and expect one fixed name. So an agent can reach the gateway at any address, and no
other certificate of the cluster, however it was issued, can stand in for the gateway's.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from pydantic import BaseModel, ConfigDict, SecretStr, model_validator

from perdure.base.credentials.names import GATEWAY_NAME

_AUTHORITY_LIFETIME = timedelta(days=3650)
GATEWAY_LIFETIME = timedelta(days=30)
"""A gateway issues its certificate itself, and a new one before half of this has passed."""
_CLOCKS_DIFFER = timedelta(hours=1)
"""A certificate is valid from this long before it was issued: the clocks of machines differ."""


@dataclass(frozen=True)
class Certificate:
    """A certificate with its private key, both in PEM."""

    certificate: bytes
    private_key: bytes


class Authority(BaseModel):
    """A certificate authority, in PEM."""

    model_config = ConfigDict(frozen=True)

    certificate: str
    private_key: SecretStr

    @model_validator(mode="after")
    def _belong_together(self) -> Authority:
        try:
            certificate, key = self._load()
        except (ValueError, TypeError):
            raise ValueError("certificate or private key is not the PEM of an elliptic curve") from None
        if certificate.public_key() != key.public_key():
            raise ValueError("the private key is not that of the certificate")
        return self

    @classmethod
    def new(cls) -> Authority:
        """Returns an authority with a new key."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("Perdure gateway authority")
        certificate = (
            _builder(name, issuer=name, public_key=key.public_key(), lifetime=_AUTHORITY_LIFETIME)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(key_cert_sign=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate=_pem(certificate).decode(), private_key=SecretStr(_private_pem(key).decode()))

    def issue(self) -> Certificate:
        """Returns a new certificate for a gateway."""
        authority, authority_key = self._load()
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(
                _name(GATEWAY_NAME), issuer=authority.subject, public_key=key.public_key(), lifetime=GATEWAY_LIFETIME
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(GATEWAY_NAME)]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
            .sign(authority_key, hashes.SHA256())
        )
        return Certificate(certificate=_pem(certificate), private_key=_private_pem(key))

    def _load(self) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        key = serialization.load_pem_private_key(self.private_key.get_secret_value().encode(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise TypeError
        return x509.load_pem_x509_certificate(self.certificate.encode()), key


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name, *, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, lifetime: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + lifetime)
    )


def _usage(*, key_cert_sign: bool = False, digital_signature: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
