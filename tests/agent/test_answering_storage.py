"""A storage that hangs while ranks read: their requests end with an error that names the file and the remedy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from perdure.agent.checkpoint import answering_storage, further_tries
from perdure.agent.checkpoint.storage import Storage
from perdure_training.node_api.storage_link import StorageAway, StorageLink
from tests.agent.test_agent_checkpoints import FOLDER, LARGE, stored_folder
from tests.support.waiting import DEADLINE, wait_for
from tests.training.checkpoint_agent import checkpoint_agent

PART = "__0_0.distcp"


class Server:
    """The server of a network file system, which answers calls until it hangs."""

    def __init__(self) -> None:
        self.mounts = [threading.Event()]
        self.answers.set()
        self.waits: list[threading.Event] = []
        """The mount of each call that waits."""
        self.pieces_before = 0
        """Pieces of a large file that it gives before it hangs."""

    @property
    def waiting(self) -> int:
        return len(self.waits)

    @property
    def hangs(self) -> bool:
        """A call of the newest mount waits."""
        return self.answers in self.waits

    @property
    def answers(self) -> threading.Event:
        """Set: the newest mount answers."""
        return self.mounts[-1]

    def wait(self) -> None:
        mount = self.answers
        self.waits.append(mount)
        mount.wait()
        self.waits.remove(mount)

    def mount_again(self) -> None:
        """It answers all further calls, and none of those that wait."""
        self.mounts.append(threading.Event())
        self.answers.set()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    played = Server()

    class Answer(Future[Any]):
        """What is late at once where the server hangs, and never where it answers, however slow the machine is."""

        def result(self, timeout: float | None = None) -> Any:
            if timeout is not None:
                wait_for(lambda: self.done() or played.hangs)
            return super().result(None if timeout is None else 0)

    monkeypatch.setattr(answering_storage, "Future", Answer)

    def hanging(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if not played.answers.is_set() and not played.pieces_before:
                played.wait()
            return method(*arguments, **named)

        return call

    pieces = Storage.pieces

    def some(self: Storage, path: str, **named: Any) -> Iterator[bytes]:
        for given, piece in enumerate(pieces(self, path, **named)):
            if not played.answers.is_set() and given == played.pieces_before:
                played.wait()
            yield piece

    for name in ("names", "sizes", "size", "read"):
        monkeypatch.setattr(Storage, name, hanging(getattr(Storage, name)))
    monkeypatch.setattr(Storage, "pieces", some)
    try:
        yield played
    finally:
        for mount in played.mounts:
            mount.set()


@pytest.fixture
def link(tmp_path: Path) -> Iterator[StorageLink]:
    with checkpoint_agent(tmp_path / "storage") as agent:
        agent.begin(1)
        yield StorageLink(agent.run_dir)


@pytest.mark.parametrize(
    ("request_", "pieces", "named"),
    [
        ({"request": "verify", "share": [0, 1]}, 0, FOLDER),
        ({"request": "verify", "share": [0, 1]}, 2, f"{FOLDER}/{PART}"),
        ({"request": "read", "name": PART}, 0, FOLDER),
        ({"request": "read", "name": PART}, 2, f"{FOLDER}/{PART}"),
    ],
    ids=["verify", "in the middle of a file that is verified", "read", "in the middle of a file that is read"],
)
def test_a_storage_that_hangs_is_named_with_the_file_and_the_remedy(
    server: Server, link: StorageLink, tmp_path: Path, request_: dict[str, Any], pieces: int, named: str
):
    stored_folder(tmp_path, content=b"begin", records={"size": LARGE, "truncated": LARGE})
    server.pieces_before = pieces
    server.answers.clear()
    asked = request_ | {"folder": FOLDER}
    if pieces and asked["request"] == "read":
        # Its bytes were on their way.
        with pytest.raises(StorageAway, match="ended while it answered"):
            link.read(asked, patience=0)
    for _ in range(20):
        with pytest.raises(StorageAway) as error:
            link.read(asked, patience=0)
        assert f"{tmp_path / 'storage'} hangs: it has given nothing of {named} for 60 s" in str(error.value)
        assert "See on this node whether its server is reached, and mount it again" in str(error.value)
    assert server.waiting == 1, "no further call waits"

    server.answers.set()
    wait_for(lambda: not server.waiting)
    answer = link.insist if asked["request"] == "verify" else link.read
    assert answer(asked, patience=DEADLINE)


@pytest.fixture
def tries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that begins after it tries a call that hangs again at once."""
    monkeypatch.setattr(further_tries, "_FIRST_PAUSE", 0.0)


def test_a_storage_that_is_mounted_again_is_read_although_earlier_calls_wait_forever(
    server: Server, tries_at_once: None, link: StorageLink, tmp_path: Path
):
    before, asked = server.answers, {"request": "verify", "share": [0, 1], "folder": FOLDER}
    stored_folder(tmp_path, content=b"begin", records={})
    before.clear()
    with pytest.raises(StorageAway, match="hangs: it has given nothing of"):
        link.ask(asked, within=DEADLINE)
    server.mount_again()
    assert link.insist(asked, patience=DEADLINE) == {"damage": ""}
    assert server.waiting == 1
    before.set()
