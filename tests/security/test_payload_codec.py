"""Tests of the payload codec and its keys: what is readable with which key, and what is refused."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from temporalio.api.common.v1 import Payload
from temporalio.api.failure.v1 import Failure
from temporalio.client import Client
from temporalio.converter import ActivitySerializationContext, SerializationContext, WorkflowSerializationContext
from temporalio.exceptions import ApplicationError, TimeoutError

from perdure.base.encryption.codec import ENCRYPTED, REFUSED_PAYLOAD, UNREADABLE_JSON, PayloadEncryption, Plain
from perdure.base.encryption.earlier_runs import EarlierRuns
from perdure.base.encryption.keys import PayloadKeys, create_keys, rotate_keys
from perdure.base.errors import PayloadKeysError, Refused
from perdure.worker import _kubernetes_backend

SECRET = {"env": {"HF_TOKEN": "hunter2"}}
JOB = WorkflowSerializationContext(namespace="default", workflow_id="job/default/llama")
OTHER_JOB = WorkflowSerializationContext(namespace="default", workflow_id="job/default/other")
OTHER_NAMESPACE = WorkflowSerializationContext(namespace="other", workflow_id="job/default/llama")
ACTIVITY_OF_JOB = ActivitySerializationContext(
    namespace="default",
    activity_id="1",
    activity_type="create_node",
    activity_task_queue="perdure",
    workflow_id="job/default/llama",
    workflow_type="TrainingJob",
    is_local=False,
)


@pytest.fixture
def keys(tmp_path: Path) -> PayloadKeys:
    return create_keys(tmp_path / "keys.json")


def strict(keys: PayloadKeys | None) -> PayloadEncryption:
    return PayloadEncryption.of(keys, Plain.REFUSE)


async def encrypted(codec: PayloadEncryption, context: SerializationContext | None = JOB) -> Payload:
    converter = codec.data_converter.with_context(context) if context else codec.data_converter
    (payload,) = await converter.encode([SECRET])
    return payload


async def decrypted(codec: PayloadEncryption, payload: Payload, context: SerializationContext | None = JOB) -> object:
    converter = codec.data_converter.with_context(context) if context else codec.data_converter
    (value,) = await converter.decode([payload])
    return value


async def test_a_payload_is_readable_with_its_key_only(keys: PayloadKeys, tmp_path: Path) -> None:
    payload = await encrypted(strict(keys))
    assert payload.metadata["encoding"] == ENCRYPTED
    assert b"hunter2" not in payload.SerializeToString()
    assert await decrypted(strict(keys), payload) == SECRET
    for codec, why in (
        (strict(create_keys(tmp_path / "other.json")), "other.json does not have"),
        (PayloadEncryption.of(None), "PERDURE_PAYLOAD_KEYS_FILE does not configure"),
    ):
        with pytest.raises(PayloadKeysError, match=why) as missing:
            await decrypted(codec, payload)
        assert "PERDURE_PAYLOAD_KEYS_FILE" in missing.value.remedy


@pytest.mark.parametrize("context", [OTHER_JOB, OTHER_NAMESPACE], ids=["other-job", "other-namespace"])
async def test_a_payload_of_one_workflow_is_refused_in_another(
    keys: PayloadKeys, context: SerializationContext
) -> None:
    payload = await encrypted(strict(keys))
    with pytest.raises(ApplicationError, match="was encrypted for default/job/default/llama") as refused:
        await decrypted(strict(keys), payload, context)
    assert (refused.value.type, refused.value.non_retryable) == (REFUSED_PAYLOAD, True)
    # Nor can an attacker who copies it write another name on it.
    for name in ("encryption-context", "encryption-key-id"):
        forged = Payload()
        forged.CopyFrom(payload)
        forged.metadata[name] = b"" if name == "encryption-context" else b"made up"
        with pytest.raises((ApplicationError, PayloadKeysError)):
            await decrypted(strict(keys), forged, context)


async def test_a_payload_travels_between_a_workflow_and_its_activities(keys: PayloadKeys) -> None:
    assert await decrypted(strict(keys), await encrypted(strict(keys), ACTIVITY_OF_JOB), JOB) == SECRET
    assert await decrypted(strict(keys), await encrypted(strict(keys), JOB), ACTIVITY_OF_JOB) == SECRET


async def test_tools_that_name_no_workflow_read_and_write_for_any(keys: PayloadKeys) -> None:
    assert await decrypted(strict(keys), await encrypted(strict(keys), JOB), None) == SECRET
    assert await decrypted(strict(keys), await encrypted(strict(keys), None), JOB) == SECRET


async def test_a_changed_payload_is_refused(keys: PayloadKeys) -> None:
    payload = await encrypted(strict(keys))
    payload.data = payload.data[:-1] + bytes([payload.data[-1] ^ 1])
    with pytest.raises(ApplicationError, match="was changed"):
        await decrypted(strict(keys), payload)
    with pytest.raises(ApplicationError, match="was changed"):
        await decrypted(strict(keys), Payload(metadata=payload.metadata, data=b"short"))


async def test_plain_payloads_are_read_where_they_are_accepted(keys: PayloadKeys) -> None:
    plain = await encrypted(PayloadEncryption.of(None))
    assert b"hunter2" in plain.data
    assert await decrypted(PayloadEncryption.of(keys), plain) == SECRET
    with pytest.raises(ApplicationError, match="is not encrypted"):
        await decrypted(strict(keys), plain)


async def test_one_bad_payload_does_not_keep_others_from_being_decoded(keys: PayloadKeys) -> None:
    """The SDK decodes all payloads of a workflow task at once: an error would block the workflow."""
    codec = strict(keys).with_context(JOB)
    good = await encrypted(strict(keys))
    plain = await encrypted(PayloadEncryption.of(None))
    unknown = Payload(metadata={"encoding": ENCRYPTED, "encryption-key-id": b"\xff"}, data=b"")
    decoded = await codec.decode([plain, good, unknown])
    assert codec.data_converter.payload_converter.from_payloads([decoded[1]]) == [SECRET]


async def test_what_began_before_the_key_stays_plain(keys: PayloadKeys) -> None:
    class Began(EarlierRuns):
        async def _ask(self, workflow_id: str) -> bool:
            if workflow_id == JOB.workflow_id:
                self._asked[workflow_id] = 0.0
            return workflow_id == JOB.workflow_id

    codec = PayloadEncryption(keys=keys, plain=Plain.REFUSE, earlier=Began(datetime.now(UTC)))
    assert (await encrypted(codec)).metadata["encoding"] == ENCRYPTED, "until it is known"
    plain = await encrypted(PayloadEncryption.of(None))
    assert await decrypted(codec, plain) == SECRET
    assert (await encrypted(codec)).metadata["encoding"] == b"json/plain", "its agents may have no key"
    assert (await encrypted(codec, OTHER_JOB)).metadata["encoding"] == ENCRYPTED
    with pytest.raises(ApplicationError, match="is not encrypted"):
        await decrypted(codec, plain, OTHER_JOB)


async def test_rotation_is_noticed_by_processes_that_run(keys: PayloadKeys) -> None:
    older = await encrypted(strict(keys))
    running = strict(PayloadKeys(keys.path))
    rotated = rotate_keys(keys.path)
    assert [key.id for key in rotated.all[1:]] == [key.id for key in keys.all]
    newer = await encrypted(strict(rotated))
    assert newer.metadata["encryption-key-id"] == rotated.newest.id.encode()
    assert await decrypted(running, newer) == SECRET
    assert await decrypted(strict(rotated), older) == SECRET
    assert rotated.since == keys.since < rotated.newest.created < datetime.now(UTC) + timedelta(seconds=1)


async def test_a_failure_tells_nothing_without_the_key(keys: PayloadKeys) -> None:
    converter = strict(keys).data_converter.with_context(JOB)
    failure = Failure()
    await converter.encode_failure(ApplicationError("hunter2 is wrong", SECRET), failure)
    assert b"hunter2" not in failure.SerializeToString()
    decoded = await converter.decode_failure(failure)
    assert isinstance(decoded, ApplicationError)
    assert decoded.message == "hunter2 is wrong"


def test_keys_are_made_once_and_for_their_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    made = create_keys(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert create_keys(path).all == made.all
    rotate_keys(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [item.name for item in tmp_path.iterdir()] == ["keys.json"], "no draft is left"


def test_a_file_that_others_may_read_is_refused(keys: PayloadKeys) -> None:
    keys.path.chmod(0o440)
    assert PayloadKeys(keys.path).all == keys.all
    keys.path.chmod(0o644)
    with pytest.raises(PayloadKeysError, match="every user") as refused:
        PayloadKeys(keys.path)
    assert "chmod 600" in refused.value.remedy


@pytest.mark.parametrize(
    "content",
    ["", "{}", '{"keys": []}', '{"keys": [{"id": "a", "secret": "aHVudGVyMg==", "created": "2026-01-01T00:00:00Z"}]}'],
)
def test_a_wrong_file_is_refused_without_showing_its_content(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(PayloadKeysError) as refused:
        PayloadKeys(path)
    assert "aHVudGVyMg" not in f"{refused.value} {refused.value.__cause__}"


def test_a_key_is_not_in_its_text(keys: PayloadKeys) -> None:
    secret = keys.newest.model_dump(mode="json")["secret"]
    assert secret in keys.path.read_text()
    shown = f"{keys.newest!r} {keys.newest} {strict(keys)!r} {keys!r}"
    assert secret not in shown
    assert repr(keys.newest.secret) not in shown


async def test_a_worker_gives_pods_no_keys_and_refuses_to_lose_them(
    keys: PayloadKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their agents could read nothing."""
    monkeypatch.setenv("PERDURE_KUBERNETES_AGENT_IMAGE", "perdure")
    for codec, refused in ((strict(keys), True), (PayloadEncryption.of(None), False)):
        client = await Client.connect("127.0.0.1:9", lazy=True, data_converter=codec.data_converter)
        if refused:
            with pytest.raises(Refused, match="are given no keys"):
                _kubernetes_backend(client)
        else:
            assert _kubernetes_backend(client).name == "kubernetes"


@pytest.mark.parametrize(
    ("content", "why"),
    [(b'{"a":' * 300 + b"1" + b"}" * 300, "recursion limit"), (b'{"a": ', "EOF")],
    ids=["deep", "cut"],
)
async def test_what_no_reader_of_json_can_read_is_refused_for_good(content: bytes, why: str) -> None:
    with pytest.raises(ApplicationError, match=why) as refused:
        await decrypted(PayloadEncryption.of(None), Payload(metadata={"encoding": b"json/plain"}, data=content))
    assert (refused.value.type, refused.value.non_retryable) == (UNREADABLE_JSON, True)


@pytest.mark.parametrize("keys", [False, True], ids=["plain", "encrypted"])
async def test_a_failure_whose_details_nobody_can_read_is_read_without_them(keys: bool, tmp_path: Path) -> None:
    codec = PayloadEncryption.of(create_keys(tmp_path / "keys.json") if keys else None)
    wrong, right = Payload(metadata={"encoding": b"x/y"}, data=b"x"), codec.data_converter.payload_converter
    timeout = Failure(message="late")
    timeout.timeout_failure_info.last_heartbeat_details.payloads.append(wrong)
    cause = Failure(message="why")
    cause.application_failure_info.details.payloads.extend(right.to_payloads([{"step": 1}]))
    failed = Failure(message="no", cause=cause)
    failed.application_failure_info.type = "CutOff"
    failed.application_failure_info.details.payloads.append(wrong)
    read = codec.data_converter.failure_converter.from_failure(failed, right)
    assert isinstance(read, ApplicationError)
    assert (read.message, read.type, read.details) == ("no", "CutOff", ())
    assert isinstance(read.__cause__, ApplicationError)
    assert read.__cause__.details == ({"step": 1},)
    late = codec.data_converter.failure_converter.from_failure(timeout, right)
    assert isinstance(late, TimeoutError)
    assert list(late.last_heartbeat_details) == []
