"""Secrets of machines that join through the gateway: of their tickets, and their own tokens.

A job knows digests only, so that no history holds a secret.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Final

_SECRET_BYTES: Final = 32
_ID_LENGTH: Final = 12


def new_secret() -> str:
    """Returns a secret of 256 bits."""
    return secrets.token_hex(_SECRET_BYTES)


def digest_of(secret: str) -> str:
    """Returns what may be stored of a secret. Secrets are random, so the digest needs no salt."""
    return hashlib.sha256(secret.encode()).hexdigest()


def id_of(digest: str) -> str:
    """Returns the name of a ticket, for people."""
    return digest[:_ID_LENGTH]
