"""What a node keeps for others in its memory, and what their scripts get back of it."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from perdure.agent.checkpoint import copy_service, peer_copies
from perdure.agent.checkpoint.copy_service import CopyService
from perdure.agent.checkpoint.storage import Storage
from perdure.agent.checkpoint.watched import Pieces
from perdure.contract import NodeCredentials
from perdure.workflows.policy.checkpoints.copies import copies_token
from perdure_launcher import watched_folder
from perdure_launcher.watched_folder import WatchedFolder
from perdure_training.node_api.bodies import RestoringReport
from perdure_training.node_api.storage_link import StorageAway, StorageLink
from tests.support.small_disks import small_disk
from tests.support.waiting import DEADLINE, wait_for
from tests.training.checkpoint_agent import CheckpointAgent

HOLDER = """
import signal, sys, tempfile
from pathlib import Path
from tests.training.checkpoint_agent import CheckpointAgent
from perdure.contract import NodeCredentials

node = NodeCredentials.model_validate_json(sys.argv[2])
with tempfile.TemporaryDirectory() as folder:
    agent = CheckpointAgent(Path(folder), None, node=node, copies_dir=Path(sys.argv[1]), watch="/saves")
    print(agent.checkpoints.receiver.port, flush=True)
    signal.pause()
"""
"""An agent in a process of its own."""


def node_of(rank: int, incarnation: int = 1) -> NodeCredentials:
    return NodeCredentials(
        uid="run", role="worker", rank=rank, incarnation=incarnation, token=f"secret-{rank}-{incarnation}"
    )


class Nodes:
    """Agents of one job's nodes, with their folders."""

    def __init__(self, stack: ExitStack, tmp_path: Path) -> None:
        self._stack = stack
        self._tmp_path = tmp_path

    def start(
        self,
        rank: int,
        *,
        incarnation: int = 1,
        copies_dir: Path | None = None,
        shared: bool = False,
        storage: str | None = None,
    ) -> CheckpointAgent:
        node = node_of(rank, incarnation)
        # The path of a socket is short.
        run_dir = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        if copies_dir is None and not shared:
            copies_dir = self._tmp_path / f"memory-{rank}-{incarnation}"
            copies_dir.mkdir()
        agent = CheckpointAgent(run_dir, storage, node=node, copies_dir=copies_dir, watch="/saves", keep_last=2)
        self._stack.callback(agent.close)
        return agent


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(stack, tmp_path)


def watch(agent: CheckpointAgent, folder: Path, **fields: Any) -> WatchedFolder:
    ready = threading.Event()
    watched = WatchedFolder(folder, StorageLink(agent.run_dir), on_restored=ready.set, **fields)
    watched.start()
    assert ready.wait(DEADLINE)
    return watched


def saved(agent: CheckpointAgent, folder: Path) -> list[str]:
    """The files that the script of this node finds at its start."""
    watch(agent, folder).close(within=DEADLINE)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def save(agent: CheckpointAgent, folder: Path, *steps: int) -> None:
    """A script that saves, and ends."""
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        # One thread looks at a time: here this one, and then the folder's own.
        patch.setattr(watched_folder, "LOOK", DEADLINE)
        watched = watch(agent, folder)
        for step in steps:
            torch.save({"step": step}, folder / f"step-{step}.pt")
            watched.look()
            watched.look()
        watched.close(within=DEADLINE)


def folder_of(agent: CheckpointAgent) -> Path:
    receiver, folder = agent.checkpoints.receiver, agent.copies_dir
    assert receiver is not None
    assert folder is not None
    return folder / receiver.folder


def ask(agent: CheckpointAgent, content: bytes = b"", **request: Any) -> tuple[dict[str, Any], bytes]:
    """Sends a request of node 1, or of one that says so; returns the first line of the answer and what follows."""
    receiver = agent.checkpoints.receiver
    assert receiver is not None
    token = copies_token(agent.node.token, role="worker", rank=1)
    line = json.dumps({"owner": "worker-1", "token": token} | request).encode() + b"\n"
    with socket.create_connection(("127.0.0.1", receiver.port), timeout=DEADLINE) as connection:
        connection.sendall(line + content)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as answer:
            return json.loads(answer.readline() or b"{}"), answer.read()


def test_a_replaced_node_gets_back_what_another_one_keeps(nodes: Nodes, tmp_path: Path):
    holder, node = nodes.start(0), nodes.start(1)
    node.hold_copies(holder)
    save(node, tmp_path / "saves", 1, 2, 3)
    replacement = nodes.start(1, incarnation=2)
    replacement.hold_copies(holder)
    assert saved(replacement, tmp_path / "other") == ["step-3.pt"]
    assert torch.load(tmp_path / "other" / "step-3.pt") == {"step": 3}
    # Only so many as `keep_last` says.
    assert len(list(folder_of(holder).glob("worker-1/watched/worker-1/*/manifest.json"))) == 2


def test_what_was_damaged_on_the_other_node_is_not_given_back(nodes: Nodes, tmp_path: Path):
    holder, node = nodes.start(0), nodes.start(1)
    node.hold_copies(holder)
    save(node, tmp_path / "saves", 1, 2)
    [file] = folder_of(holder).rglob("step-2.pt")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    replacement = nodes.start(1, incarnation=2)
    replacement.hold_copies(holder)
    assert saved(replacement, tmp_path / "other") == ["step-1.pt"]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"{",
        b"null\n",
        b"\xff\n",
        b"[" * 8000 + b"\n",
        b"{}\n",
        b'{"bytes": "7"}\n',
        b'{"bytes": -1}\n',
        b'{"bytes": 1e999}\n',
        b'{"problem": 7}\n',
        b'{"bytes": 1000000000000}\n',
    ],
)
def test_an_answer_that_is_none_proves_no_version_damaged(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
):
    holder, node = nodes.start(0), nodes.start(1)
    node.hold_copies(holder)
    save(node, tmp_path / "saves", 1)
    answer_truly = CopyService._answer

    def spoil(service: CopyService, line: bytes, connection: socket.socket, *rest: Any) -> None:
        if json.loads(line)["do"] == "read":
            connection.sendall(answer)
        else:
            answer_truly(service, line, connection, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(CopyService, "_answer", spoil)
        with pytest.raises(StorageAway, match=r"node that keeps the copies|bytes were announced"):
            StorageLink(node.run_dir).ask({"request": "watched", "do": "begin"}, within=DEADLINE)
    replacement = nodes.start(1, incarnation=2)
    replacement.hold_copies(holder)
    assert saved(replacement, tmp_path / "other") == ["step-1.pt"]


def test_all_is_copied_again_when_another_node_keeps_the_copies(nodes: Nodes, tmp_path: Path):
    first, node = nodes.start(0), nodes.start(1)
    node.hold_copies(first)
    folder = tmp_path / "saves"
    folder.mkdir()
    watched = watch(node, folder)
    torch.save({"step": 1}, folder / "step-1.pt")
    wait_for(lambda: list(folder_of(first).rglob("manifest.json")))
    second = nodes.start(0, incarnation=2)
    node.hold_copies(second)
    wait_for(lambda: list(folder_of(second).rglob("manifest.json")))
    watched.close(within=DEADLINE)
    replacement = nodes.start(1, incarnation=2)
    replacement.hold_copies(second)
    assert saved(replacement, tmp_path / "other") == ["step-1.pt"]


def test_a_command_waits_for_the_node_with_its_copies_and_says_so(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watched_folder, "WAITS", 0.2)
    holder, node = nodes.start(0), nodes.start(1)
    node.hold_copies(holder)
    save(node, tmp_path / "saves", 1)
    replacement = nodes.start(1, incarnation=2)
    ready, reports = threading.Event(), list[RestoringReport]()
    watched = WatchedFolder(
        tmp_path / "other", StorageLink(replacement.run_dir), on_restored=ready.set, report=reports.append
    )
    watched.start()
    wait_for(lambda: reports and "no other node is known yet" in reports[-1].problem)
    assert not ready.is_set()
    replacement.hold_copies(holder)
    assert ready.wait(DEADLINE)
    watched.close(within=DEADLINE)
    assert (tmp_path / "other" / "step-1.pt").exists()
    assert reports[-1] == RestoringReport()


def test_a_command_does_not_wait_for_ever_for_a_node_that_is_lost_too(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(peer_copies, "WAITS_FOR_TARGET", 1.0)
    holder, replacement = nodes.start(0), nodes.start(1, incarnation=2)
    replacement.hold_copies(holder)
    holder.checkpoints.close()
    with caplog.at_level(logging.WARNING):
        assert saved(replacement, tmp_path / "other") == []
    assert "node 0, which keeps its copies, is not reached" in caplog.text


def test_the_first_node_at_its_place_waits_for_nobody(nodes: Nodes, tmp_path: Path):
    assert saved(nodes.start(1), tmp_path / "other") == []


def test_an_agent_that_is_killed_finds_what_it_has_kept(nodes: Nodes, tmp_path: Path):
    memory = tmp_path / "memory"
    memory.mkdir()
    command = [sys.executable, "-c", HOLDER, memory, node_of(0).model_dump_json()]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    try:
        assert holder.stdout is not None
        port = int(holder.stdout.readline())
        token = copies_token(node_of(0).token, role="worker", rank=1)
        line = json.dumps({"owner": "worker-1", "token": token, "do": "write", "path": "a", "size": 4}).encode()
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as connection:
            connection.sendall(line + b"\nkept")
            with connection.makefile("rb") as answers:
                assert json.loads(answers.readline()) == {}
                assert json.loads(answers.readline())["size"] == 4
    finally:
        holder.kill()
        holder.communicate()
    again = nodes.start(0, copies_dir=memory)
    assert ask(again, do="read", path="a", offset=0, length=9) == ({"bytes": 4}, b"kept")
    again.checkpoints.close()
    assert not list(memory.iterdir())


def test_what_a_killed_agent_left_stays_for_it_while_another_nodes_agent_starts(nodes: Nodes, tmp_path: Path):
    left = tmp_path / "perdure-copies-x"
    left.mkdir()
    (left / "owner").write_text(node_of(0).path)
    other = folder_of(nodes.start(1, copies_dir=tmp_path))
    assert left.exists()
    assert other != left
    assert folder_of(nodes.start(0, copies_dir=tmp_path)) == left


@pytest.mark.usefixtures("root")
def test_what_does_not_fit_is_refused_with_the_size_and_leaves_nothing(
    nodes: Nodes, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watched_folder, "_AGAIN", 0.2)
    with small_disk(tmp_path / "small", "1m") as small:
        holder, node = nodes.start(0, copies_dir=small), nodes.start(1)
        node.hold_copies(holder)
        folder = tmp_path / "saves"
        folder.mkdir()
        watched = watch(node, folder)
        torch.save({"step": 1}, folder / "step-1.pt")
        wait_for(lambda: list(small.rglob("manifest.json")))
        torch.save(torch.zeros(1 << 18), folder / "large-2.pt")
        size = (folder / "large-2.pt").stat().st_size
        problem = f"large-2.pt: {size:,} bytes do not fit into the 1,048,576 bytes of memory of node 0"
        wait_for(lambda: problem in caplog.text)
        assert "checkpoint.keep_last" in caplog.text
        (folder / "large-2.pt").unlink()
        torch.save({"step": 3}, folder / "step-3.pt")
        wait_for(lambda: list(small.rglob("files/step-3.pt")))
        watched.close(within=DEADLINE)
        assert not list(small.rglob("large*"))
        # What was tried in vain is gone.
        assert len(list(small.glob("*/worker-1/watched/worker-1/*"))) == 2
        holder.checkpoints.close()


def test_shared_memory_is_left_to_others_by_half(nodes: Nodes):
    holder = nodes.start(0, shared=True)
    known, _ = ask(holder, do="write", path="a", size=1 << 49)
    assert "half of it stays free for others" in known["problem"]


def test_memory_that_others_fill_while_a_copy_is_written_is_named_to_its_owner(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    holder, owner = nodes.start(0), nodes.start(1)
    owner.hold_copies(holder)

    def fail(storage: Storage, path: str, pieces: Iterable[bytes]) -> tuple[int, int]:
        next(iter(pieces))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Storage, "write", fail)
    peers = owner.checkpoints._peers
    assert peers is not None
    size = 3 * copy_service.PIECE
    with pytest.raises(OSError, match="was not copied as it is: node 0: No space left on device"):
        peers.write("1/files/step-1.pt", Pieces(size, [bytes(size)]))


@pytest.mark.parametrize(
    "changes",
    [
        {"token": ""},
        {"token": None},
        {"token": "é"},
        {"token": "secret-0-1"},
        {"owner": "worker-2"},
        {"owner": "worker"},
        {"owner": "../worker-1"},
        {"owner": None},
    ],
)
@pytest.mark.parametrize("do", ["names", "read", "write", "size", "remove"])
def test_without_the_owners_token_nothing_is_given_or_taken(nodes: Nodes, do: str, changes: dict[str, Any]):
    holder = nodes.start(0)
    assert ask(holder, b"secret", do="write", path="a/b", size=6)[0] == {}
    request: dict[str, Any] = {"do": do, "path": "a/b", "size": 1, "offset": 0, "length": 6, "first": "b"}
    answer = ask(holder, b"x", **request | changes)
    assert answer == ({"problem": "the token is not the owner's for this node"}, b"")
    assert [path.read_bytes() for path in folder_of(holder).rglob("b")] == [b"secret"]


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "a//b", ".", "", "a/\0", "a" * 2000, 7, None])
@pytest.mark.parametrize("do", ["read", "write", "size", "remove"])
def test_no_path_leads_out_of_the_owners_folder(nodes: Nodes, do: str, path: Any):
    holder = nodes.start(0)
    fields: dict[str, Any] = {"size": 1, "offset": 0, "length": 1, "first": "a"}
    answer, _ = ask(holder, b"x", do=do, path=path, **fields)
    assert "path" in answer["problem"]
    assert [one.name for one in folder_of(holder).iterdir()] == ["owner"]


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[]\n", b"null\n", b'{"do": "names"}\n', b"[" * 8000 + b"\n", b"x" * 100_000]
)
def test_what_is_no_request_ends_its_own_connection_only(nodes: Nodes, line: bytes):
    holder = nodes.start(0)
    receiver = holder.checkpoints.receiver
    assert receiver is not None
    with socket.create_connection(("127.0.0.1", receiver.port), timeout=DEADLINE) as connection:
        answer = b""
        # It may have closed the connection before it has read everything.
        with contextlib.suppress(OSError):
            connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(1000)
        assert answer == b"" or b"problem" in answer
    assert ask(holder, do="names", path="")[0] == {"names": []}


@pytest.mark.parametrize("size", [-1, True, "7", None, 1 << 60])
def test_sizes_are_bounded(nodes: Nodes, size: Any):
    answer, _ = ask(nodes.start(0), b"", do="write", path="a", size=size)
    assert "size: expected a whole number" in answer["problem"]


def test_a_file_that_does_not_arrive_as_a_whole_is_not_there(nodes: Nodes):
    holder = nodes.start(0)
    assert ask(holder, b"half", do="write", path="a/b", size=8)[0] == {}
    wait_for(lambda: not list(folder_of(holder).rglob("b")))
    assert ask(holder, do="size", path="a/b")[0] == {"missing": True}
    assert ask(holder, b"whole", do="write", path="a/b", size=5)[0] == {}
    assert ask(holder, do="read", path="a/b", offset=1, length=100) == ({"bytes": 4}, b"hole")


def test_an_agent_says_its_rack(nodes: Nodes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PERDURE_RACK", "a17")
    receiver = nodes.start(0).checkpoints.receiver
    assert receiver is not None
    assert receiver.rack == "a17"


def test_silent_connections_are_bounded_and_keep_no_owner_out(nodes: Nodes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(copy_service, "_INTRODUCTION", 10 * DEADLINE)
    holder = nodes.start(0)
    receiver = holder.checkpoints.receiver
    assert receiver is not None
    silent = [socket.create_connection(("127.0.0.1", receiver.port), timeout=DEADLINE) for _ in range(40)]
    try:
        assert silent[0].recv(1) == b""
        assert ask(holder, do="names", path="")[0] == {"names": []}
    finally:
        for one in silent:
            one.close()


def test_one_that_says_nothing_is_ended(nodes: Nodes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(copy_service, "_INTRODUCTION", 0.2)
    receiver = nodes.start(0).checkpoints.receiver
    assert receiver is not None
    with socket.create_connection(("127.0.0.1", receiver.port), timeout=DEADLINE) as silent:
        assert silent.recv(1) == b""
