"""Grants: what an agent may do at the gateway, signed by the worker that creates its node, or by the gateway for a
machine that joins.

A grant is public: it stands in the manifest of a pod. It says which pod it is for, and the gateway accepts it together
with that pod's own service account token only; the grant of a machine, together with that machine's own token. Since a
grant names everything that its agent may touch, the gateway has to remember nothing.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Iterable, Sequence
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, SecretBytes, ValidationError, model_validator

_MAC_BYTES: Final = hashlib.sha256().digest_size
_LENGTH_BYTES: Final = 4
_FOR_GRANTS: Final = b"perdure grant\0"
_FOR_TASKS: Final = b"perdure task\0"
"""Put before what is signed, so that no signature of one kind is valid for the other."""


class NotGranted(Exception):
    """A grant or a task token is not genuine, or is another agent's."""


class PodName(BaseModel):
    """The pod of an agent."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    namespace: str
    name: str


class Grant(BaseModel):
    """The rights of the agent of one incarnation."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    temporal_namespace: str
    job_id: str
    """Workflow ID of the TrainingJob, which the agent may signal and query."""
    group_id: str
    """Workflow ID of the NodeGroup, which the agent may signal."""
    task_queue: str
    """The node's own task queue, which the agent may poll."""
    uid: str
    role: str
    rank: int
    incarnation: int
    pod: PodName | None = None
    """The pod whose service account token must accompany the grant; None for a machine that joined."""
    machine: str = ""
    """The digest of the token that must accompany the grant, for a machine that is no pod."""
    created: bool = False
    """Whether a worker has created the node on that machine; otherwise the machine joined, and has the place for as
    long as the job says so."""

    @model_validator(mode="after")
    def _has_one_holder(self) -> Self:
        if (self.pod is None) == (not self.machine):
            raise ValueError("a grant is for a pod or for a machine")
        return self

    @property
    def node(self) -> str:
        """The incarnation, as text."""
        return f"{self.uid}/{self.role}-{self.rank}/{self.incarnation}"

    def sign(self, keys: Sequence[SecretBytes]) -> str:
        """Returns the grant as text, with a signature by the first key."""
        content = self.model_dump_json().encode()
        return f"{_text(content)}.{_text(_mac(keys[0], _FOR_GRANTS, content))}"

    @classmethod
    def verify(cls, text: str, keys: Iterable[SecretBytes]) -> Grant:
        """Reads a signed grant.

        Raises:
            NotGranted: if the text is not a grant, or no key has signed it.
        """
        content_text, _, mac_text = text.partition(".")
        try:
            # Strictly, so that one grant has one text: gateways remember those that they have verified.
            content, mac = (b64decode(one, altchars=b"-_", validate=True) for one in (content_text, mac_text))
        except ValueError as error:
            raise NotGranted("the grant is not base64") from error
        if not _is_genuine(mac, keys, _FOR_GRANTS, content):
            raise NotGranted("the grant has no valid signature")
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            raise NotGranted("the grant is of another release") from error

    def sign_task(self, token: bytes, workflow: str, keys: Sequence[SecretBytes]) -> bytes:
        """Returns a task token that only this agent can use.

        Args:
            token: The server's token of the task.
            workflow: The ID of the workflow that waits for its result.
            keys: The first one signs.
        """
        content = _join(workflow.encode(), token)
        return _mac(keys[0], _FOR_TASKS, self._task(content)) + content

    def verify_task(self, signed: bytes, keys: Iterable[SecretBytes]) -> tuple[bytes, str]:
        """Returns the server's task token, and the ID of the workflow that waits for its result.

        Raises:
            NotGranted: if it is not the token of a task that was handed to this agent.
        """
        mac, content = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        if not _is_genuine(mac, keys, _FOR_TASKS, self._task(content)):
            raise NotGranted("the task token was not handed to this node")
        length = int.from_bytes(content[:_LENGTH_BYTES])
        end = _LENGTH_BYTES + length
        return content[end:], content[_LENGTH_BYTES:end].decode()

    def _task(self, content: bytes) -> bytes:
        return f"{self.temporal_namespace}\0{self.node}\0".encode() + content


def _join(first: bytes, second: bytes) -> bytes:
    """Joins two texts so that they can be separated again."""
    return len(first).to_bytes(_LENGTH_BYTES) + first + second


def _mac(key: SecretBytes, purpose: bytes, content: bytes) -> bytes:
    return hmac.digest(key.get_secret_value(), purpose + content, "sha256")


def _is_genuine(mac: bytes, keys: Iterable[SecretBytes], purpose: bytes, content: bytes) -> bool:
    return any(hmac.compare_digest(mac, _mac(key, purpose, content)) for key in keys)


def _text(content: bytes) -> str:
    return urlsafe_b64encode(content).decode()
