"""The keys for payloads: a file of keys, of which the first one encrypts and all decrypt.

The format is the same for the file in the state folder and for a file that a Kubernetes Secret mounts. Putting a new
key first rotates: what older keys have encrypted stays readable for as long as they are in the file.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import stat
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from pydantic import AwareDatetime, Base64Bytes, BaseModel, ConfigDict, Field, ValidationError, field_serializer

from perdure.base.errors import PayloadKeysError

KEYS_FILE_VARIABLE = "PERDURE_PAYLOAD_KEYS_FILE"
"""Path of the file of keys. Unset: payloads are not encrypted, except on the local default."""

KEY_BYTES = 32
"""The length of a key for AES-256."""


class PayloadKey(BaseModel):
    """One key."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    id: str = Field(min_length=1, max_length=64)
    """Names the key in each payload that it has encrypted."""
    secret: Base64Bytes = Field(repr=False)
    """32 random bytes, as Base64."""
    created: AwareDatetime
    """When the key was made. What began before the oldest key may be unencrypted."""

    @field_serializer("secret", when_used="json")
    def _secret_as_text(self, value: bytes) -> str:
        return base64.b64encode(value).decode()

    @classmethod
    def generate(cls) -> Self:
        """Makes a random key."""
        secret = base64.b64encode(secrets.token_bytes(KEY_BYTES))
        return cls(id=secrets.token_hex(8), secret=secret, created=datetime.now(UTC))


class _KeysFile(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    keys: tuple[PayloadKey, ...] = Field(min_length=1)


class PayloadKeys:
    """The keys of one file, which is read again when a payload names a key that was added to it."""

    def __init__(self, path: Path) -> None:
        """Reads the file.

        Raises:
            PayloadKeysError: if it cannot be read or used.
        """
        self.path = path
        self._version = 0
        self._keys: tuple[PayloadKey, ...] = ()
        self._read()

    @property
    def newest(self) -> PayloadKey:
        """The key that encrypts."""
        return self._keys[0]

    @property
    def all(self) -> tuple[PayloadKey, ...]:
        """All keys; the one that encrypts comes first."""
        return self._keys

    @property
    def since(self) -> datetime:
        """When the oldest key was made."""
        return min(key.created for key in self._keys)

    def find(self, key_id: str) -> PayloadKey | None:
        """The key of an ID; None if the file has none such."""
        for key in self._keys:
            if key.id == key_id:
                return key
        if self.path.stat().st_mtime_ns == self._version:
            return None
        self._read()
        return next((key for key in self._keys if key.id == key_id), None)

    def _read(self) -> None:
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                content = file.read()
        except OSError as error:
            raise PayloadKeysError(
                f"the file of payload keys {self.path} cannot be read: {error.strerror}",
                remedy=f"{KEYS_FILE_VARIABLE} names it; `perdure payload-keys FILE` makes one.",
            ) from error
        if found.st_mode & stat.S_IRWXO:
            raise PayloadKeysError(
                f"every user of this machine may read or write the payload keys in {self.path}",
                remedy=f"chmod 600 {self.path}; for a Secret of Kubernetes: defaultMode 0440.",
            )
        try:
            keys = _KeysFile.model_validate_json(content).keys
        except ValidationError as error:
            raise PayloadKeysError(
                f"{self.path} is not a file of payload keys: {error}", remedy="`perdure payload-keys FILE` makes one."
            ) from None
        if wrong := [key.id for key in keys if len(key.secret) != KEY_BYTES]:
            raise PayloadKeysError(f"the key {wrong[0]} in {self.path} does not have {KEY_BYTES} bytes")
        self._keys, self._version = keys, found.st_mtime_ns


def create_keys(path: Path) -> PayloadKeys:
    """Makes a file with one new key, or returns the keys of the file that exists.

    Raises:
        PayloadKeysError: if the file that exists cannot be used.
    """
    if not path.exists():
        _write(path, (PayloadKey.generate(),), replace=False)
    return PayloadKeys(path)


def rotate_keys(path: Path) -> PayloadKeys:
    """Puts a new key first; the older ones stay.

    Raises:
        PayloadKeysError: if the file cannot be used.
    """
    _write(path, (PayloadKey.generate(), *PayloadKeys(path).all), replace=True)
    return PayloadKeys(path)


def _write(path: Path, keys: tuple[PayloadKey, ...], *, replace: bool) -> None:
    """Writes the file, readable by its owner only, as a whole; a file that another process made meanwhile is kept
    unless it is to be replaced. `perdure.base.files` is for folders of this user alone; this one may be in any
    folder."""
    content = json.dumps(_KeysFile(keys=keys).model_dump(mode="json"), indent=1) + "\n"
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            Path(name).replace(path)
        else:
            try:
                os.link(name, path)
            except FileExistsError:
                return
    finally:
        Path(name).unlink(missing_ok=True)
