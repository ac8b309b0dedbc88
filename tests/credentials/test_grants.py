"""Tests of grants: what a worker signed is read as it was, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretBytes

from perdure.base.credentials.grants import Grant, NotGranted, PodName

KEY, OTHER = SecretBytes(b"k" * 32), SecretBytes(b"o" * 32)
GRANT = Grant(
    temporal_namespace="default",
    job_id="job/nlp/bert",
    group_id="job/nlp/bert/abcd0123/worker/0",
    task_queue="node/abcd0123/worker-3/2",
    uid="abcd0123",
    role="worker",
    rank=3,
    incarnation=2,
    pod=PodName(namespace="nlp", name="bert-worker-3-abcd01232"),
)


def test_a_grant_is_read_as_it_was_signed() -> None:
    assert Grant.verify(GRANT.sign([KEY]), [KEY]) == GRANT
    assert GRANT.node == "abcd0123/worker-3/2"


def test_after_a_key_is_replaced_older_grants_hold_until_it_is_removed() -> None:
    old, new = GRANT.sign([KEY]), GRANT.sign([OTHER, KEY])
    for text in (old, new):
        assert Grant.verify(text, [OTHER, KEY]) == GRANT
    assert Grant.verify(new, [OTHER]) == GRANT
    with pytest.raises(NotGranted):
        Grant.verify(old, [OTHER])


@given(st.integers(min_value=0), st.integers(min_value=1, max_value=255))
def test_no_byte_of_a_grant_can_be_changed(position: int, by: int) -> None:
    signed = bytearray(GRANT.sign([KEY]).encode())
    index = position % len(signed)
    signed[index] = (signed[index] + by) % 256
    text = signed.decode("latin-1")
    try:
        read = Grant.verify(text, [KEY])
    except NotGranted:
        return
    # Base64 ignores the unused bits of its last character.
    assert read == GRANT


@pytest.mark.parametrize("more", ["!", "\n", "~" * 100, " "])
def test_a_grant_has_one_text(more: str) -> None:
    """A gateway remembers texts."""
    with pytest.raises(NotGranted):
        Grant.verify(more + GRANT.sign([KEY]), [KEY])


@given(st.text())
def test_text_is_no_grant(text: str) -> None:
    with pytest.raises(NotGranted):
        Grant.verify(text, [KEY])


def test_a_task_belongs_to_the_incarnation_it_was_handed_to() -> None:
    token = GRANT.sign_task(b"the server's", "job/nlp/bert", [KEY])
    assert GRANT.verify_task(token, [OTHER, KEY]) == (b"the server's", "job/nlp/bert")
    for changes in ({"rank": 4}, {"incarnation": 3}, {"uid": "0"}, {"role": "x"}, {"temporal_namespace": "x"}):
        with pytest.raises(NotGranted):
            GRANT.model_copy(update=changes).verify_task(token, [KEY])
    for forged in (b"", b"the server's", token[:-1], token + b"x", b"\0" + token[1:]):
        with pytest.raises(NotGranted):
            GRANT.verify_task(forged, [KEY])


def test_the_signature_of_a_grant_is_none_of_a_task() -> None:
    """Both are made with the same key."""
    content = GRANT.model_dump_json().encode()
    token = GRANT.sign_task(content, "", [KEY])
    assert token[:32] not in GRANT.sign([KEY]).encode()
    with pytest.raises(NotGranted):
        GRANT.verify_task(token[:32] + b"other", [KEY])
