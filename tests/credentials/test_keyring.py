"""Tests of the key ring and of the certificates that its authority issues."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from perdure.base.credentials.certificates import GATEWAY_LIFETIME
from perdure.base.credentials.keyring import AUTHORITY, AUTHORITY_KEY, SIGNING_KEYS, Keyring, KeyringInvalid
from perdure.base.credentials.names import GATEWAY_NAME


def test_a_key_ring_is_read_as_it_was_written_and_shows_no_secret() -> None:
    keyring = Keyring.new()
    entries = keyring.to_entries()
    assert Keyring.from_entries(entries) == keyring
    shown = repr(keyring)
    assert entries[SIGNING_KEYS].strip() not in shown
    assert "PRIVATE KEY" not in shown
    assert keyring.signing_keys[0].get_secret_value().hex() not in shown


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({SIGNING_KEYS: ""}, "signing-keys is missing"),
        ({SIGNING_KEYS: "\n"}, "signing-keys has no key"),
        ({SIGNING_KEYS: "abcd"}, "line 1: the key has 2 bytes and needs 32"),
        ({SIGNING_KEYS: "xyz"}, "hexadecimal"),
        ({AUTHORITY: ""}, "ca.crt is missing"),
        ({AUTHORITY: "x"}, "not the PEM"),
        ({AUTHORITY_KEY: "x"}, "not the PEM"),
        ({AUTHORITY_KEY: Keyring.new().to_entries()[AUTHORITY_KEY]}, "not that of the certificate"),
    ],
)
def test_what_is_wrong_is_named_without_the_secrets(changes: dict[str, str], problem: str) -> None:
    entries = Keyring.new().to_entries()
    with pytest.raises(KeyringInvalid, match=problem) as error:
        Keyring.from_entries(entries | changes)
    assert entries[AUTHORITY_KEY][40:80] not in str(error.value)


def test_a_gateway_certificate_is_valid_for_the_gateway_and_for_a_while() -> None:
    authority = Keyring.new().authority
    issued = x509.load_pem_x509_certificate(authority.issue().certificate)
    trusted = Store([x509.load_pem_x509_certificate(authority.certificate.encode())])
    now = datetime.now(UTC)
    for moment in (now, now + GATEWAY_LIFETIME - timedelta(minutes=1)):
        PolicyBuilder().store(trusted).time(moment).build_server_verifier(x509.DNSName(GATEWAY_NAME)).verify(issued, [])
    for name, moment in ((GATEWAY_NAME, now + GATEWAY_LIFETIME + timedelta(minutes=1)), ("temporal.svc", now)):
        verifier = PolicyBuilder().store(trusted).time(moment).build_server_verifier(x509.DNSName(name))
        with pytest.raises(VerificationError):
            verifier.verify(issued, [])


def test_another_authority_is_not_trusted() -> None:
    issued = x509.load_pem_x509_certificate(Keyring.new().authority.issue().certificate)
    others = Store([x509.load_pem_x509_certificate(Keyring.new().authority.certificate.encode())])
    with pytest.raises(VerificationError):
        PolicyBuilder().store(others).build_server_verifier(x509.DNSName(GATEWAY_NAME)).verify(issued, [])
