"""Copies of snapshots: what a receiver takes, refuses, and survives."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from perdure_launcher.system.ports import PortPool
from perdure_training.checkpoint.verification import fingerprint, is_intact
from perdure_training.snapshots.arena import Arena, Header, crc32
from perdure_training.snapshots.copies import CopyReceiver, CopySender, ReceiverAddress, Refused

FOLDER = "stage-0/state"
CONTENT = memoryview(bytearray(range(256)) * 4096)
CRC32 = crc32(CONTENT)
HEADER = Header(
    step=7,
    rank=3,
    world_size=4,
    generation=2,
    replicated=False,
    index_at=0,
    size=len(CONTENT),
    checksum=fingerprint(CONTENT),
)


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[CopyReceiver]:
    pool = PortPool("127.0.0.1", listening=True, size=1)
    receiver = CopyReceiver(tmp_path, pool.take(pool.numbers[0]), host="127.0.0.1")
    yield receiver
    receiver.close()


@pytest.fixture
def sender(receiver: CopyReceiver) -> Iterator[CopySender]:
    # As the ranks of a world tell it to each other.
    sender = CopySender(ReceiverAddress.load(receiver.address.dump()), folder=FOLDER)
    yield sender
    sender.close()


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def ask(receiver: CopyReceiver, line: bytes) -> bytes:
    """What the receiver answers to a line."""
    with socket.create_connection((receiver.address.host, receiver.address.port), timeout=30) as connection:
        connection.sendall(line)
        return connection.makefile("rb").readline()


def request(receiver: CopyReceiver, **changes: Any) -> bytes:
    fields = {"receiver_token": receiver.address.token, "folder": FOLDER, "slot": 0, "header": asdict(HEADER)}
    fields |= {"crc32": CRC32} | changes
    return json.dumps(fields).encode() + b"\n"


def test_copies_arrive_as_they_were_saved(tmp_path: Path, sender: CopySender):
    for step, slot in ((7, 2), (8, 0), (9, 2)):
        sender.send(replace(HEADER, step=step), CONTENT, slot=slot, crc32=CRC32)
    found = {slot.path.name: (slot, header) for slot, header in Arena(tmp_path / FOLDER).snapshots()}
    assert {name: header.step for name, (_, header) in found.items()} == {"rank-3-of-4.0": 8, "rank-3-of-4.2": 9}
    assert all(is_intact(slot, header) for slot, header in found.values())


def test_a_copy_that_ends_early_is_no_snapshot(tmp_path: Path, receiver: CopyReceiver, sender: CopySender):
    sender.send(HEADER, CONTENT, slot=0, crc32=CRC32)
    with socket.create_connection((receiver.address.host, receiver.address.port), timeout=30) as connection:
        incoming = connection.makefile("rb")
        connection.sendall(request(receiver, header=asdict(replace(HEADER, step=8))))
        assert incoming.readline() == b"\n"
        connection.sendall(CONTENT[:-1])
        connection.shutdown(socket.SHUT_WR)
        assert incoming.readline() == b""
    assert list(Arena(tmp_path / FOLDER).snapshots()) == []


def test_a_copy_that_is_sent_again_is_not_given_up_meanwhile(
    tmp_path: Path, receiver: CopyReceiver, sender: CopySender
):
    """The loaded step is copied first in each world: a rank that ends then must not cost the copy."""
    sender.send(HEADER, CONTENT, slot=0, crc32=CRC32)
    assert ask(receiver, request(receiver, header=asdict(replace(HEADER, restores=1)))) == b"held\n"
    [(slot, header)] = Arena(tmp_path / FOLDER).snapshots()
    assert header == replace(HEADER, restores=1)
    assert is_intact(slot, header)
    sender.send(replace(HEADER, restores=2), CONTENT, slot=0, crc32=CRC32)
    assert [header.restores for _, header in Arena(tmp_path / FOLDER).snapshots()] == [2]


def test_a_copy_that_is_damaged_is_taken_again(tmp_path: Path, sender: CopySender):
    sender.send(HEADER, CONTENT, slot=0, crc32=CRC32)
    [(slot, _)] = Arena(tmp_path / FOLDER).snapshots()
    slot.read()[0] ^= 1
    sender.send(HEADER, CONTENT, slot=0, crc32=CRC32)
    [(slot, header)] = Arena(tmp_path / FOLDER).snapshots()
    assert is_intact(slot, header)


def test_a_copy_that_changed_on_its_way_is_refused(tmp_path: Path, sender: CopySender):
    with pytest.raises(Refused, match="step 7 of rank 3 was damaged on its way"):
        sender.send(HEADER, CONTENT, slot=0, crc32=CRC32 ^ 1)
    assert list(Arena(tmp_path / FOLDER).snapshots()) == []
    sender.send(HEADER, CONTENT, slot=0, crc32=CRC32)
    assert len(list(Arena(tmp_path / FOLDER).snapshots())) == 1


def test_a_copy_that_does_not_fit_is_refused_with_its_size(tmp_path: Path, sender: CopySender):
    with pytest.raises(Refused, match=r"1,152,921,504,606,846,976 bytes do not fit"):
        sender.send(replace(HEADER, size=1 << 60), CONTENT, slot=0, crc32=CRC32)
    assert files(tmp_path) == []


def test_a_stranger_writes_nothing_and_is_told_nothing(tmp_path: Path, receiver: CopyReceiver):
    stranger = CopySender(replace(receiver.address, token="guessed"), folder=FOLDER)
    with pytest.raises(Refused, match="token"):
        stranger.send(HEADER, CONTENT, slot=0, crc32=CRC32)
    for token in ("é", "\ud800"):
        assert receiver.address.token.encode() not in ask(receiver, request(receiver, receiver_token=token))
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"folder": "../stage-0/state"},
        {"folder": "stage-0/.."},
        {"folder": "stage-0/state/"},
        {"folder": 7},
        {"receiver_token": None},
        {"slot": 4},
        {"slot": -1},
        {"slot": "0"},
        {"slot": 0.5},
        {"crc32": None},
        {"extra": 1},
        {"header": []},
        {"header": {"step": 1}},
        {"header": asdict(HEADER) | {"size": -1}},
        {"header": asdict(HEADER) | {"rank": "../../3"}},
        {"header": asdict(HEADER) | {"checksum": None}},
    ],
)
def test_what_is_no_request_is_refused(tmp_path: Path, receiver: CopyReceiver, changes: dict[str, Any]):
    assert ask(receiver, request(receiver, **changes)).startswith(b"no request: ")
    assert files(tmp_path) == []


@pytest.mark.parametrize("line", [b"\n", b"[]\n", b"\xff\xfe\n", b"{\n", b"[" * 4000 + b"\n", b"GET / HTTP/1.1\r\n"])
def test_what_is_not_json_is_refused(tmp_path: Path, receiver: CopyReceiver, line: bytes):
    assert ask(receiver, line).startswith(b"no request: ")
    assert files(tmp_path) == []


def test_a_line_without_an_end_is_given_up(receiver: CopyReceiver, sender: CopySender):
    assert ask(receiver, b"x" * 4096) == b""
    sender.send(HEADER, CONTENT, slot=0, crc32=CRC32)


def test_without_its_receiver_a_copy_fails(receiver: CopyReceiver, sender: CopySender):
    receiver.close()
    with pytest.raises(ConnectionError):
        sender.send(HEADER, CONTENT, slot=0, crc32=CRC32)


class SlowConnection(socket.socket):
    """A connection to a receiver that is far away, and busy. No time passes: what would take longer than the socket's
    timeout, which is one for each call, fails at once."""

    sends: float = 1 << 18
    """Bytes a second."""
    answers_after: float = 0.0
    """Seconds."""

    def sendall(self, data: Any, flags: int = 0) -> None:
        self._take(memoryview(data).nbytes / self.sends)
        super().sendall(data, flags)

    def recv_into(self, *arguments: Any) -> int:
        self._take(self.answers_after)
        return super().recv_into(*arguments)

    def _take(self, seconds: float) -> None:
        timeout = self.gettimeout()
        if timeout is not None and seconds > timeout:
            raise TimeoutError("timed out")


def play_slow_connections(monkeypatch: pytest.MonkeyPatch, *, answers_after: float = 0.0) -> None:
    def connect(place: tuple[str, int], timeout: float) -> socket.socket:
        connection = SlowConnection(socket.AF_INET)
        connection.answers_after = answers_after
        connection.settimeout(timeout)
        connection.connect(place)
        return connection

    monkeypatch.setattr(socket, "create_connection", connect)


@contextlib.contextmanager
def played_receiver(answers: Sequence[bytes]) -> Iterator[ReceiverAddress]:
    """A receiver that closes each connection after its answer to a request."""

    def serve() -> None:
        for answer in answers:
            connection, _ = listening.accept()
            with connection, connection.makefile("rb") as incoming:
                incoming.readline()
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield ReceiverAddress(host="127.0.0.1", port=listening.getsockname()[1], token="token")
        thread.join()


def test_a_copy_may_take_longer_than_a_receiver_may_be_silent(
    tmp_path: Path, sender: CopySender, monkeypatch: pytest.MonkeyPatch
):
    play_slow_connections(monkeypatch)
    content = memoryview(bytearray(1 << 24))
    header = replace(HEADER, size=len(content), checksum=fingerprint(content))
    sender.send(header, content, slot=0, crc32=crc32(content))
    assert [header.size for _, header in Arena(tmp_path / FOLDER).snapshots()] == [1 << 24]


def test_a_receiver_has_time_to_read_a_large_copy_before_it_answers(monkeypatch: pytest.MonkeyPatch):
    """It computes the checksum of what it has, at a gigabyte a second, and at a tenth of that beside a training."""
    play_slow_connections(monkeypatch, answers_after=600.0)
    with played_receiver([b"held\n\n"]) as address:
        sender = CopySender(address, folder=FOLDER)
        sender.send(replace(HEADER, size=60 << 30), memoryview(b""), slot=0, crc32=CRC32)
        sender.close()


def test_a_connection_that_was_lost_between_two_copies_costs_none():
    with played_receiver([b"held\n\n", b"held\n\n"]) as address:
        sender = CopySender(address, folder=FOLDER)
        sender.send(HEADER, CONTENT, slot=0, crc32=CRC32)
        sender.send(HEADER, CONTENT, slot=0, crc32=CRC32)
        sender.close()
