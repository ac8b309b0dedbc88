"""Tests of how a rank tells its collectives: what it tells by value, and processes that answer, or cannot."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from perdure_launcher.probes import stacks
from perdure_launcher.rank_plugins import flight_recorder
from perdure_launcher.rank_plugins.collectives import MOST_GROUPS, positions
from perdure_launcher.rank_plugins.flight_recorder import Collective
from perdure_training.node_api.bodies import RankCollective
from perdure_training.node_api.layout import STACKS
from tests.launcher.test_rank_stacks import HOLDS_THE_LOCK, SLEEPS, only, rank
from tests.support.waiting import DEADLINE

pytestmark = pytest.mark.usefixtures("patient_probe")

BEGIN = """
import os
os.environ["WORLD_SIZE"] = "2"
from perdure_launcher.rank_plugins import collectives
from perdure_launcher.rank_plugins.flight_recorder import Collective
def recorded(): {recorded}
collectives.read_collectives = recorded
"""
RECORDED = "return (Collective('0 (default_pg)', 7, 'gloo:all_reduce', 0, False, ((8, 4),)),)"
TOLD = RankCollective(group="0 (default_pg)", sequence=7, name="gloo:all_reduce", sizes="8x4", elements=32, ended=False)


def called(number: int, *, group: str = "0", ended: bool = True) -> Collective:
    return Collective(group, number, "gloo:all_reduce", number, ended, ((2, 3), (4,)))


def test_a_rank_is_in_the_oldest_collective_that_has_not_ended_or_after_the_newest():
    ended = [called(number) for number in range(3)]
    (after,) = positions(ended).groups
    assert (after.sequence, after.ended, after.sizes, after.elements) == (2, True, "2x3, 4", 10)
    waits = called(3, ended=False)
    (at,) = positions([*ended, waits, called(4, ended=False)]).groups
    assert (at.sequence, at.ended) == (3, False)


def test_each_process_group_is_told_and_the_last_used_first():
    told = positions([called(1, group="b"), called(1, group="a"), called(2, group="b")]).groups
    assert [(one.group, one.sequence) for one in told] == [("b", 2), ("a", 1)]
    many = positions(called(1, group=f"group {number}") for number in range(99)).groups
    assert [one.group for one in many][:2] == ["group 98", "group 97"]
    assert len(many) == MOST_GROUPS


def over_nccl(number: int, *, ended: bool, name: str = "all_reduce") -> Collective:
    return Collective("0", number, f"nccl:{name}", number, ended)


def test_each_backend_of_a_process_group_is_told():
    told = positions([over_nccl(1, ended=False), called(9), over_nccl(2, ended=False)]).groups
    assert [(one.name, one.sequence, one.ended) for one in told] == [
        ("nccl:all_reduce", 1, False),
        ("gloo:all_reduce", 9, True),
    ]


def test_what_a_device_was_given_before_a_collective_that_has_ended_is_no_wait():
    """A collective that was captured in a CUDA graph never ends by itself."""
    (told,) = positions([over_nccl(1, ended=False), over_nccl(2, ended=True)]).groups
    assert (told.sequence, told.ended) == (2, True)
    (told,) = positions([called(1, ended=False), called(2)]).groups
    assert (told.sequence, told.ended) == (1, False)


def entry(number: int, name: str = "nccl:all_reduce", **fields: Any) -> dict[str, Any]:
    known = {"process_group": ("0", "default_pg"), "collective_seq_id": number, "profiling_name": name}
    known |= {"time_created_ns": 100 * number, "retired": False, "state": "scheduled", "input_sizes": [[4]]}
    return known | {"is_p2p": False} | fields


def test_dumps_of_both_recorders_are_read_in_the_order_of_the_calls(monkeypatch: pytest.MonkeyPatch):
    gloo = [entry(1, "gloo:barrier", retired=True, state="completed"), entry(3, "gloo:broadcast", is_p2p=True)]
    nccl = [
        entry(0, state="completed", duration_ms=2.5),
        entry(2, "nccl:_all_gather_base"),
        entry(2, "nccl:coalesced", state="started"),
    ]
    dumps = [pickle.dumps({"entries": entries}) for entries in (gloo, nccl)]
    monkeypatch.setattr(flight_recorder, "dump_flight_recorders", lambda: [*dumps, pickle.dumps({})])
    found = flight_recorder.read_collectives() or ()
    assert [(one.name, one.sequence, one.ended, one.seconds) for one in found] == [
        ("nccl:all_reduce", 0, True, 0.0025),
        ("gloo:barrier", 1, True, None),
        ("nccl:coalesced", 2, False, None),
    ]
    recorded = flight_recorder.read_recorder()
    assert recorded is not None
    assert recorded.transfers == (300,)
    monkeypatch.setattr(flight_recorder, "dump_flight_recorders", list)
    assert flight_recorder.read_collectives() is None


@pytest.mark.parametrize("by_signal", [True, False])
def test_a_rank_tells_its_collectives_however_long_the_path_is(
    tmp_path: Path, by_signal: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stacks, "_COLLECTIVES_WITHIN", DEADLINE)
    folder = tmp_path / ("long" * 25)
    (folder / STACKS).mkdir(parents=True)
    with rank(folder, SLEEPS, before=BEGIN.format(recorded=RECORDED)):
        for _ in range(2):
            assert only(stacks.collect(folder, by_signal=by_signal)).collectives == (TOLD,)


@pytest.mark.parametrize(
    ("recorded", "script"),
    [
        pytest.param("return None", SLEEPS, id="its torch has no recorder"),
        pytest.param("raise KeyError('retired')", SLEEPS, id="its torch records something else"),
        pytest.param(RECORDED, HOLDS_THE_LOCK, id="its interpreter is blocked"),
    ],
)
def test_one_that_cannot_tell_its_collectives_tells_its_calls(tmp_path: Path, recorded: str, script: str):
    (tmp_path / STACKS).mkdir()
    with rank(tmp_path, script, before=BEGIN.format(recorded=recorded)):
        told = only(stacks.collect(tmp_path))
    assert told.collectives == ()
    assert told.text


def test_a_rank_says_once_why_it_tells_no_collectives(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (tmp_path / STACKS).mkdir()
    with rank(tmp_path, SLEEPS, before=BEGIN.format(recorded="raise KeyError('retired')")):
        for _ in range(2):
            assert only(stacks.collect(tmp_path, by_signal=False)).collectives == ()
    assert capfd.readouterr().err == "perdure: rank 0 does not tell in which collectives it is: KeyError: 'retired'\n"


def test_ranks_that_do_not_answer_are_waited_for_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / STACKS).mkdir()
    monkeypatch.chdir(tmp_path / STACKS)
    with ExitStack() as ranks:
        for number in range(5):
            ranks.enter_context(rank(tmp_path, SLEEPS, number=number))
        silent = [ranks.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(5)]
        for one, path in zip(silent, list(Path().iterdir()), strict=True):
            one.bind(f"{path.name}.collectives")
            one.listen()
            one.settimeout(DEADLINE)
        monkeypatch.setattr(stacks, "_COLLECTIVES_WITHIN", 2 * DEADLINE)
        with ThreadPoolExecutor(1) as thread:
            collected = thread.submit(stacks.collect, tmp_path, by_signal=False)
            # Each has been asked although none has answered.
            asked = [one.accept()[0] for one in silent]
            for connection in asked:
                connection.close()
            assert len(collected.result()) == 5


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b"[" * 20_000, b'{"groups": [{"group": 5}]}', b'{"groups": 3}', b"\xff", b" " * 100_000],
)
def test_what_training_code_answers_in_its_place_is_no_collective(
    tmp_path: Path, answer: bytes, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / STACKS).mkdir()
    with rank(tmp_path, SLEEPS):
        (path,) = (tmp_path / STACKS).iterdir()
        with socket.socket(socket.AF_UNIX) as listening:
            monkeypatch.chdir(tmp_path / STACKS)
            listening.bind(f"{path.name}.collectives")
            listening.listen()
            child = os.fork()
            if child == 0:
                connection, _ = listening.accept()
                connection.send(answer)
                os._exit(0)
            assert only(stacks.collect(tmp_path)).collectives == ()
            os.waitpid(child, 0)


def test_the_socket_of_a_process_that_has_ended_is_deleted(tmp_path: Path):
    (tmp_path / STACKS).mkdir()
    with rank(tmp_path, SLEEPS, before=BEGIN.format(recorded=RECORDED)):
        assert len(list((tmp_path / STACKS).iterdir())) == 2
    assert stacks.collect(tmp_path) == ()
    assert list((tmp_path / STACKS).iterdir()) == []


ATTACK = """
import ctypes, os, socket, sys
folder, name, user, network = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
if network:
    assert ctypes.CDLL(None).unshare(0x40000000) == 0  # CLONE_NEWNET
# Where folders above would keep the user out.
os.chdir(folder)
os.setgid(user), os.setuid(user)
with socket.socket(socket.AF_UNIX) as attacker:
    try:
        attacker.connect(name)
    except PermissionError:
        print("refused")
    else:
        print("connected")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("network", ["", "another"], ids=["same network", "another network namespace"])
def test_only_the_ranks_own_user_is_answered_whatever_the_scripts_umask(tmp_path: Path, network: str):
    (tmp_path / STACKS).mkdir()
    (tmp_path / STACKS).chmod(0o755)
    with rank(tmp_path, SLEEPS, before="import os; os.umask(0)\n" + BEGIN.format(recorded=RECORDED)):
        (name,) = (path.name for path in (tmp_path / STACKS).glob("*.collectives"))
        for user, answer in ((0, "connected"), (65534, "refused")):
            command = [sys.executable, "-c", ATTACK, str(tmp_path / STACKS), name, str(user), network]
            assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip() == answer
        assert only(stacks.collect(tmp_path)).collectives == (TOLD,)


def test_a_rank_listens_on_no_network(tmp_path: Path):
    (tmp_path / STACKS).mkdir()
    with rank(tmp_path, SLEEPS, before=BEGIN.format(recorded=RECORDED)) as process:
        own = psutil.Process(process.pid)
        assert [one for one in own.net_connections("inet") if one.status == psutil.CONN_LISTEN] == []
        # A name without a path would be known in the whole network namespace.
        assert [one.laddr[:1] for one in own.net_connections("unix") if one.laddr] == ["/"]


def test_clients_that_say_nothing_or_do_not_read_keep_no_answer_from_the_launcher(tmp_path: Path):
    (tmp_path / STACKS).mkdir()
    with rank(tmp_path, SLEEPS, before=BEGIN.format(recorded=RECORDED)) as process, ExitStack() as clients:
        (path,) = (tmp_path / STACKS).glob("*.collectives")
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        for content in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 65536, b"[" * 4096):
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.settimeout(5)
            client.connect(f"/proc/self/fd/{folder}/{path.name}")
            with suppress(OSError):
                client.sendall(content)
        os.close(folder)
        assert only(stacks.collect(tmp_path)).collectives == (TOLD,)
        assert process.poll() is None
