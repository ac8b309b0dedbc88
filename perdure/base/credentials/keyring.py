"""The secrets that workers and gateways share: keys that sign grants, and the authority of the gateways' certificates.

Kubernetes keeps them in one Secret, which a gateway creates where it is missing. Workers sign grants and need the keys
only, not the authority's private key.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from pydantic import SecretBytes, ValidationError

from perdure.base.credentials.certificates import Authority

KEY_BYTES: Final = 32
"""The length of a key: that of SHA-256's output, as RFC 2104 recommends for HMAC."""

SIGNING_KEYS, AUTHORITY, AUTHORITY_KEY = "signing-keys", "ca.crt", "ca.key"
"""The entries of the Secret."""


class KeyringInvalid(Exception):
    """The content is not a key ring; the message says what is wrong, without the secrets."""


@dataclass(frozen=True, kw_only=True)
class Keyring:
    """Signing keys and certificate authority."""

    signing_keys: tuple[SecretBytes, ...]
    """The first one signs; all of them verify. To replace a key, put a new one before it, and remove the old one when
    the jobs that were started with it have ended."""
    authority: Authority
    """Issues the gateways' certificates; agents trust no other one."""

    @classmethod
    def new(cls) -> Self:
        """Returns a key ring with new secrets."""
        return cls(signing_keys=(SecretBytes(secrets.token_bytes(KEY_BYTES)),), authority=Authority.new())

    def to_entries(self) -> dict[str, str]:
        """Returns the entries of the Secret."""
        return {
            SIGNING_KEYS: "".join(f"{key.get_secret_value().hex()}\n" for key in self.signing_keys),
            AUTHORITY: self.authority.certificate,
            AUTHORITY_KEY: self.authority.private_key.get_secret_value(),
        }

    @classmethod
    def from_entries(cls, entries: Mapping[str, str]) -> Self:
        """Reads the entries of the Secret.

        Raises:
            KeyringInvalid: if one is missing or wrong.
        """
        for name in (SIGNING_KEYS, AUTHORITY, AUTHORITY_KEY):
            if not entries.get(name):
                raise KeyringInvalid(f"{name} is missing")
        try:
            authority = Authority.model_validate(
                {"certificate": entries[AUTHORITY], "private_key": entries[AUTHORITY_KEY]}
            )
        except ValidationError as error:
            raise KeyringInvalid(f"{AUTHORITY} or {AUTHORITY_KEY}: {error.errors()[0]['msg']}") from None
        return cls(signing_keys=read_signing_keys(entries[SIGNING_KEYS]), authority=authority)


def read_signing_keys(text: str) -> tuple[SecretBytes, ...]:
    """Reads keys, one per line.

    Raises:
        KeyringInvalid: if there is none, or one is too short or not hexadecimal.
    """
    try:
        keys = tuple(SecretBytes(bytes.fromhex(line)) for line in text.split())
    except ValueError:
        raise KeyringInvalid(f"{SIGNING_KEYS}: each line must be a key in hexadecimal digits") from None
    if not keys:
        raise KeyringInvalid(f"{SIGNING_KEYS} has no key")
    for number, key in enumerate(keys, start=1):
        if len(key) < KEY_BYTES:
            raise KeyringInvalid(f"{SIGNING_KEYS}, line {number}: the key has {len(key)} bytes and needs {KEY_BYTES}")
    return keys
