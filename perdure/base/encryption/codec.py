"""The payload codec: AES-256-GCM around every payload, bound to the workflow that it belongs to.

A payload that was encrypted for one workflow is refused in another one: a person who can read and start workflows, but
has no key, can neither read a payload nor use it elsewhere. Payloads that Temporal's own tools have encrypted through
the codec server are bound to no workflow, since those tools do not name one to it.

Decoding never raises for what one payload contains: the SDK would fail the whole workflow task, so that a single bad
signal would block its workflow. Such a payload is marked instead, and conversion to a value fails: the SDK then drops
a signal, rejects an update or a query, and fails a workflow that was started with it.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError
from temporalio.api.common.v1 import Payload
from temporalio.api.failure.v1 import Failure
from temporalio.client import Client
from temporalio.contrib.pydantic import PydanticJSONPlainPayloadConverter, PydanticPayloadConverter
from temporalio.converter import (
    ActivitySerializationContext,
    CompositePayloadConverter,
    DataConverter,
    DefaultFailureConverter,
    DefaultFailureConverterWithEncodedAttributes,
    EncodingPayloadConverter,
    PayloadCodec,
    PayloadConverter,
    SerializationContext,
    WithSerializationContext,
    WorkflowSerializationContext,
)
from temporalio.exceptions import ApplicationError, FailureError

from perdure.base.encryption.earlier_runs import EarlierRuns
from perdure.base.encryption.keys import KEY_BYTES, KEYS_FILE_VARIABLE, PayloadKey, PayloadKeys
from perdure.base.errors import PayloadKeysError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

logger = logging.getLogger(__name__)

ENCRYPTED = b"binary/encrypted"
"""The encoding of an encrypted payload; Temporal's own samples and tools use the same name."""

PLAIN_VARIABLE = "PERDURE_PAYLOAD_PLAIN"
"""Whether payloads that are not encrypted are read where keys are configured: `accept`, the default, or `refuse`."""

REFUSED_PAYLOAD = "RefusedPayload"
"""The type of the error with which a payload is refused."""
UNREADABLE_JSON = "UnreadableJson"
"""The type of the error of a payload that is no JSON, or is nested too deep to be read."""

ENCRYPTED_FAILURE = "encrypted; `perdure status` and `perdure explain` show it"
"""The message of an encrypted failure. Temporal's command line prints it even with a codec server, because it decrypts
payloads only; the failure itself is among the payloads, as `encodedAttributes`."""

_NOT_CALLABLE = re.compile(
    r"Query handler for '.*' expected but not found, known queries: \[[\w ]*\]|Failed decoding arguments"
)
"""The SDK's own messages for calls that a workflow does not have, or not with these arguments. They contain nothing of
the job; the value of a wrong argument is in the cause, which is encrypted."""

_REFUSED = b"binary/perdure-refused"
_UNREADABLE = b"binary/perdure-unreadable"
_KEY_ID = "encryption-key-id"
_BOUND_TO = "encryption-context"
_NONCE_BYTES = 12


class Plain(StrEnum):
    """What happens to payloads that are not encrypted."""

    ACCEPT = "accept"
    REFUSE = "refuse"
    """They are read only for workflows that began before the oldest key was made."""


@dataclass(frozen=True)
class PayloadEncryption(PayloadCodec, WithSerializationContext):
    """The payload codec of one process."""

    keys: PayloadKeys | None
    """None: nothing is encrypted, and what is encrypted cannot be read."""
    plain: Plain = Plain.ACCEPT
    earlier: EarlierRuns | None = None
    """Workflows that began before the oldest key was made. Their payloads are not encrypted, because agents of an older
    release could not read them."""
    workflow: str | None = None
    """The ID of the workflow that payloads belong to; None if it is not known."""
    bound_to: str = ""
    """Namespace and ID of that workflow, or of the activity that no workflow has started."""

    @classmethod
    def of(cls, keys: PayloadKeys | None, plain: Plain = Plain.ACCEPT) -> Self:
        """The codec for some keys."""
        return cls(keys=keys, plain=plain, earlier=EarlierRuns(keys.since) if keys else None)

    @classmethod
    def from_environment(cls) -> Self:
        """The codec that the environment configures.

        Raises:
            PayloadKeysError: if the keys cannot be used.
        """
        if not (name := os.environ.get(KEYS_FILE_VARIABLE)):
            return cls.of(None)
        plain = Plain.REFUSE if os.environ.get(PLAIN_VARIABLE) == Plain.REFUSE else Plain.ACCEPT
        return cls.of(PayloadKeys(Path(name)), plain)

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which another process gets the same codec."""
        return {KEYS_FILE_VARIABLE: str(self.keys.path), PLAIN_VARIABLE: self.plain.value} if self.keys else {}

    @property
    def data_converter(self) -> DataConverter:
        """Pydantic's converter with this codec. The messages and stack traces of failures are encrypted, too."""
        return DataConverter(
            payload_converter_class=_PayloadConverter,
            payload_codec=self,
            failure_converter_class=EncryptedFailures if self.keys else Failures,
        )

    def use(self, client: Client) -> None:
        """Sets the client that is asked when a workflow began."""
        if self.earlier is not None:
            self.earlier.client = client

    def with_context(self, context: SerializationContext) -> Self:
        """Returns the codec for the payloads of one workflow or activity."""
        if isinstance(context, WorkflowSerializationContext):
            workflow, bound_to = context.workflow_id, f"{context.namespace}/{context.workflow_id}"
        elif isinstance(context, ActivitySerializationContext):
            workflow, place = context.workflow_id, context.workflow_id or f"activity/{context.activity_id}"
            bound_to = f"{context.namespace}/{place}"
        else:
            return self
        return replace(self, workflow=workflow, bound_to=bound_to)

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Encrypts, except for workflows whose payloads have never been encrypted."""
        if self.keys is None or (self.earlier and self.workflow and await self.earlier.still(self.workflow)):
            return list(payloads)
        key = self.keys.newest
        return [self._encrypt(payload, key) for payload in payloads]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Decrypts; marks what it refuses."""
        return [await self._decode(payload) for payload in payloads]

    def _encrypt(self, payload: Payload, key: PayloadKey) -> Payload:
        nonce = os.urandom(_NONCE_BYTES)
        sealed = _cipher(key.secret, self.bound_to).encrypt(nonce, payload.SerializeToString(), self.bound_to.encode())
        metadata = {"encoding": ENCRYPTED, _KEY_ID: key.id.encode(), _BOUND_TO: self.bound_to.encode()}
        return Payload(metadata=metadata, data=nonce + sealed)

    async def _decode(self, payload: Payload) -> Payload:
        if payload.metadata.get("encoding") == ENCRYPTED:
            return self._decrypt(payload)
        if self.keys is None or (self.earlier and self.workflow and await self.earlier.includes(self.workflow)):
            return payload
        if self.plain is Plain.ACCEPT:
            return payload
        return _refuse("it is not encrypted, and this control plane reads encrypted payloads only")

    def _decrypt(self, payload: Payload) -> Payload:
        key_id = payload.metadata.get(_KEY_ID, b"").decode(errors="replace")
        key = self.keys.find(key_id) if self.keys else None
        if key is None:
            has = f"{self.keys.path} does not have" if self.keys else f"{KEYS_FILE_VARIABLE} does not configure"
            return Payload(
                metadata={"encoding": _UNREADABLE},
                data=f"a payload cannot be decrypted: it needs the key {key_id!r}, which {has}".encode(),
            )
        bound_to = payload.metadata.get(_BOUND_TO, b"").decode(errors="replace")
        if bound_to and self.bound_to and bound_to != self.bound_to:
            return _refuse(f"it was encrypted for {bound_to}, not for {self.bound_to}")
        from cryptography.exceptions import InvalidTag

        try:
            opened = _cipher(key.secret, bound_to).decrypt(
                payload.data[:_NONCE_BYTES], payload.data[_NONCE_BYTES:], bound_to.encode()
            )
        except (InvalidTag, ValueError):
            return _refuse(f"the key {key_id!r} did not encrypt it, or it was changed")
        return Payload.FromString(opened)


@functools.lru_cache(maxsize=4096)
def _cipher(secret: bytes, bound_to: str) -> AESGCM:
    """The cipher of one workflow, whose key is derived: random nonces of one key are unique for 2^32 payloads, which
    agents of a large site send within weeks."""
    # Most processes have no keys.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    derived = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=b"perdure payload " + bound_to.encode())
    return AESGCM(derived.derive(secret))


def _refuse(reason: str) -> Payload:
    logger.warning("a payload is refused: %s", reason)
    return Payload(metadata={"encoding": _REFUSED}, data=f"a payload is refused: {reason}".encode())


def readable(payload: Payload) -> Payload:
    """The decoded payload, or the reason why it was not decoded as a JSON text, for people."""
    if payload.metadata.get("encoding") not in (_REFUSED, _UNREADABLE):
        return payload
    return Payload(metadata={"encoding": b"json/plain"}, data=json.dumps(payload.data.decode()).encode())


class _Refused(EncodingPayloadConverter):
    """Fails on payloads that the codec has refused: permanently, because no retry changes them."""

    @property
    def encoding(self) -> str:
        return _REFUSED.decode()

    def to_payload(self, value: Any) -> Payload | None:
        return None

    def from_payload(self, payload: Payload, type_hint: type | None = None) -> Any:
        raise ApplicationError(payload.data.decode(), type=REFUSED_PAYLOAD, non_retryable=True)


class _Unreadable(EncodingPayloadConverter):
    """Fails on payloads whose key is missing. It is not a reason to fail a job: the task is retried until there is the
    key."""

    @property
    def encoding(self) -> str:
        return _UNREADABLE.decode()

    def to_payload(self, value: Any) -> Payload | None:
        return None

    def from_payload(self, payload: Payload, type_hint: type | None = None) -> Any:
        raise PayloadKeysError(
            payload.data.decode(),
            remedy=f"Set {KEYS_FILE_VARIABLE} to the file of keys that the job's control plane uses.",
        )


class _Json(PydanticJSONPlainPayloadConverter):
    """Refuses what is no JSON, or is nested deeper than the reader of JSON follows: the SDK would fail the first
    workflow task of a job that was started with it, again and again, and the job would neither run nor end."""

    def from_payload(self, payload: Payload, type_hint: type | None = None) -> Any:
        try:
            return super().from_payload(payload, type_hint)
        except ValidationError as error:
            (first, *_) = error.errors(include_url=False, include_input=False)
            if first["type"] != "json_invalid":
                raise
            raise ApplicationError(first["msg"], type=UNREADABLE_JSON, non_retryable=True) from None


class Failures(DefaultFailureConverter):
    """Reads any failure: where its details, or the last heartbeat of what timed out, cannot be read, it has none.
    Agents write both, and the SDK would fail the workflow task of their group again and again."""

    def from_failure(self, failure: Failure, payload_converter: PayloadConverter) -> BaseException:
        try:
            return super().from_failure(failure, payload_converter)
        except (FailureError, LookupError, RuntimeError, ValueError):
            bare = Failure()
            bare.CopyFrom(failure)
            match bare.WhichOneof("failure_info"):
                case "application_failure_info":
                    bare.application_failure_info.ClearField("details")
                case "canceled_failure_info":
                    bare.canceled_failure_info.ClearField("details")
                case "timeout_failure_info":
                    bare.timeout_failure_info.ClearField("last_heartbeat_details")
                case _:
                    raise
            return super().from_failure(bare, payload_converter)


class EncryptedFailures(Failures, DefaultFailureConverterWithEncodedAttributes):
    """Encrypts the messages and stack traces of failures, except what tells a caller how to call."""

    def to_failure(self, exception: BaseException, payload_converter: PayloadConverter, failure: Failure) -> None:
        super().to_failure(exception, payload_converter, failure)
        text = str(exception)
        readable = type(exception) is RuntimeError and _NOT_CALLABLE.fullmatch(text)
        failure.message = text if readable else ENCRYPTED_FAILURE


class _PayloadConverter(CompositePayloadConverter):
    """Pydantic's converter, and the errors for what the codec could not decode."""

    def __init__(self) -> None:
        usual = PydanticPayloadConverter().converters.values()
        own = _Json()
        others = (converter for converter in usual if converter.encoding != own.encoding)
        super().__init__(*others, own, _Refused(), _Unreadable())
