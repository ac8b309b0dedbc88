"""Tests of the handler's parts with their real counterparts: torch's store calls, its log, sockets, files."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perdure_launcher.rank_exits import ExitSpool, ExitWatch, describe_status, with_error
from perdure_launcher.rank_plugins.error_file import error_content
from perdure_launcher.rendezvous.store import WorldStore
from perdure_launcher.state import RendezvousState, StateFile
from perdure_launcher.system.ports import PortPool
from perdure_training.node_api.bodies import RankExit, World
from tests.support.ports import free_ports

WORLD = World(
    generation=3,
    nodes=3,
    group_rank=0,
    base_rank=4,
    world_size=9,
    store_address="127.0.0.1",
    store_port=1,
    store_host=True,
)


@pytest.mark.parametrize("group_rank", [0, 1])
def test_torchrun_gets_its_ranks_from_the_world_alone(group_rank: int) -> None:
    """torchrun's own code, run on the store: it would wait forever for nodes that do not answer."""
    from dataclasses import replace

    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    world = replace(WORLD, group_rank=group_rank)
    store: Any = WorldStore(world, exit_barrier=lambda: None)
    spec: Any = SimpleNamespace(role="default", local_world_size=2)
    torchrun: Any = SimpleElasticAgent
    workers = torchrun._assign_worker_ranks(SimpleNamespace(), store, group_rank, 3, spec)
    assert [(worker.local_rank, worker.global_rank, worker.world_size) for worker in workers] == [(0, 4, 9), (1, 5, 9)]


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_exit_barrier_is_the_jobs_and_not_this_nodes(nodes: int) -> None:
    from torch.distributed.elastic.utils import store as store_util

    asked: list[bool] = []
    store: Any = WorldStore(WORLD, exit_barrier=lambda: asked.append(True))
    store_util.barrier(store=store, world_size=nodes, key_prefix="torchelastic/agent/terminal_state")
    assert asked == [True]


def test_the_store_keeps_values_and_never_waits_for_others() -> None:
    store = WorldStore(WORLD, exit_barrier=lambda: None)
    store.set("a", "text")
    store.multi_set(["b", "c"], [b"1", "2"])
    assert store.multi_get(["a", "b", "c"]) == [b"text", b"1", b"2"]
    assert (store.add("n", 2), store.add("n", 3)) == (2, 5)
    store.wait(["a", "b"], timedelta(seconds=1))
    assert (store.check(["a"]), store.check(["a", "z"])) == (True, False)
    assert (store.delete_key("a"), store.delete_key("a")) == (True, False)
    with pytest.raises(KeyError):
        store.get("z")
    with pytest.raises(KeyError):
        store.wait(["z"])


def test_ports_listen_from_the_start_and_are_handed_out_once() -> None:
    pool = PortPool("127.0.0.1", listening=True, size=3)
    ports = pool.numbers
    assert (len(set(ports)), pool.host) == (3, "127.0.0.1")
    early = socket.create_connection(("127.0.0.1", ports[0]), timeout=5)
    taken = pool.take(ports[0])
    accepted, _ = taken.accept()
    accepted.sendall(b"hello")
    assert early.recv(5) == b"hello"
    pool.replenish()
    assert len(pool.numbers) == 3
    assert ports[0] not in pool.numbers
    with pytest.raises(OSError, match="in use"):
        pool.take(ports[0])
    taken.close()
    pool.take(ports[0]).close()
    pool.close()


def test_no_other_process_gets_reserved_ports() -> None:
    pool = PortPool("127.0.0.1", listening=False, size=1)
    [port] = pool.numbers
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    pool.take(port).close()
    pool.close()


def test_the_ports_after_a_worlds_are_left_to_its_ranks() -> None:
    pool = PortPool("127.0.0.1", listening=False, allowed=free_ports(8))
    world = pool.numbers[0]
    pool.take(world).close()
    pool.keep_clear_of(world)
    pool.replenish()
    assert len(pool.numbers) == 2
    assert world + 1 not in pool.numbers
    other_node = PortPool("127.0.0.1", listening=False, allowed=range(world + 1, world + 2))
    assert other_node.numbers == [world + 1]
    other_node.keep_clear_of(world)
    assert other_node.numbers == []
    other_node.replenish()
    assert other_node.numbers == [world + 1], "there is no other one"
    pool.close()
    other_node.close()


@pytest.mark.parametrize(
    ("address", "host"), [("203.0.113.7", "127.0.0.1"), ("no-such-host.invalid", "127.0.0.1"), ("2001:db8::7", "::1")]
)
def test_an_address_that_is_not_ours_is_listened_for_on_all(address: str, host: str) -> None:
    pool = PortPool(address, listening=True, size=1)
    socket.create_connection((host, pool.numbers[0]), timeout=5).close()
    assert pool.host == host
    pool.close()


@pytest.mark.parametrize("listening", [True, False])
def test_ports_of_a_range_come_round_after_all_the_others(listening: bool) -> None:
    allowed = free_ports(40)
    with socket.create_server(("127.0.0.1", allowed[3])):
        pool = PortPool("127.0.0.1", listening=listening, allowed=allowed, start=40 * 7 + 38)
        assert pool.numbers == [allowed[index] for index in (35, 39, 0, 4, 8, 12, 16, 20)]
        neighbour = PortPool("127.0.0.1", listening=listening, allowed=allowed)
        assert set(neighbour.numbers).isdisjoint(pool.numbers)
        neighbour.close()
        used: list[int] = []
        for _ in range(39):
            used.append(pool.numbers[0])
            pool.take(used[-1]).close()
            pool.replenish()
        assert sorted(used) == [port for port in allowed if port != allowed[3]]
        pool.close()


def test_the_ports_after_that_of_a_world_are_left_to_its_script() -> None:
    pool = PortPool("127.0.0.1", listening=True, allowed=free_ports(40))
    for port in range(pool.numbers[0] + 1, pool.numbers[0] + 4):
        socket.create_server(("127.0.0.1", port)).close()
    pool.close()


def test_a_range_without_a_free_port_names_its_knob() -> None:
    allowed = free_ports(2)
    servers = [socket.create_server(("127.0.0.1", port)) for port in allowed]
    pool = PortPool("127.0.0.1", listening=True, allowed=allowed)
    assert (pool.numbers, pool.problem.split(";")[0]) == (
        [],
        f"none of the ports {allowed[0]}-{allowed[1]} is free for the world's store (Address already in use)",
    )
    assert "network.store_ports" in pool.problem
    servers[1].close()
    pool.replenish()
    assert (pool.numbers, pool.problem) == ([allowed[1]], "")
    servers[0].close()
    pool.close()


class Context:
    """As torch's `SubprocessContext` logs a failure: from `_poll`, with the failures on itself."""

    def __init__(self, failures: dict[int, Any], error_files: dict[int, str]) -> None:
        self._failures = failures
        self.error_files = error_files

    def _poll(self, log: logging.Logger) -> None:
        first = next(iter(self._failures.values()), SimpleNamespace(exitcode=-9, local_rank=1, pid=77))
        log.error(
            "failed (exitcode: %s) local_rank: %s (pid: %s) of binary: %s",
            first.exitcode,
            first.local_rank,
            first.pid,
            "python",
        )


@pytest.fixture
def elastic_log() -> Any:
    log = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    before = list(log.filters)
    yield log
    log.filters[:] = before


def watch(stop_grace: timedelta = timedelta(seconds=1)) -> tuple[ExitWatch, list[Any]]:
    heard: list[Any] = []
    watching = ExitWatch(stop_grace=stop_grace, warm_folder=Path("/nonexistent"), on_exits=heard.append)
    watching.base_rank = 10
    watching.install()
    return watching, heard


def failure(local_rank: int, pid: int, code: int, path: Path | str = "") -> Any:
    return SimpleNamespace(local_rank=local_rank, pid=pid, exitcode=code, error_file=str(path))


def test_all_ranks_that_failed_are_learned_from_the_log(elastic_log: logging.Logger, tmp_path: Path) -> None:
    watching, heard = watch()
    path = tmp_path / "error.json"
    path.write_text(json.dumps(error_content(ValueError("bad\nloss"), "Traceback …")))
    Context({0: failure(0, 70, 1, path), 1: failure(1, 71, -11)}, {})._poll(elastic_log)
    first, second = watching.take()
    assert (first.global_rank, first.exit_code, first.error, first.traceback) == (
        10,
        1,
        "ValueError: bad loss",
        "Traceback …",
    )
    assert first.time == pytest.approx(time.time(), abs=60)
    assert (second.local_rank, second.signal, second.exit_code, second.error) == (1, 11, None, None)
    assert heard == [(first, second)]
    assert watching.take() == []


def test_the_record_alone_tells_the_first(elastic_log: logging.Logger) -> None:
    watching, _ = watch()
    Context({}, {1: "/nowhere"})._poll(elastic_log)
    [only] = watching.take()
    assert (only.local_rank, only.global_rank, only.pid, only.signal) == (1, 11, 77, 9)


def test_what_torchrun_itself_ended_is_no_failure_and_is_hurried(elastic_log: logging.Logger) -> None:
    watching, _ = watch(timedelta(milliseconds=200))
    deaf = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); signal.pause()",
        ],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert deaf.stdout
    deaf.stdout.readline()
    elastic_log.warning("Sending process %s closing signal %s", deaf.pid, "SIGTERM")
    assert deaf.wait(30) == -signal.SIGKILL
    Context({0: failure(0, 5, 1), 1: failure(1, deaf.pid, -9)}, {})._poll(elastic_log)
    assert [item.local_rank for item in watching.take()] == [0]


def test_ranks_have_the_jobs_grace_where_torchrun_itself_is_told_to_end(elastic_log: logging.Logger) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    watch(timedelta(0))
    rank = subprocess.Popen(["sleep", "100"], start_new_session=True)
    try:
        raise SignalException("told to end", signal.SIGTERM)
    except SignalException:
        elastic_log.warning("Sending process %s closing signal %s", rank.pid, "SIGTERM")
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(0.5)
    rank.kill()
    rank.wait()


def test_a_log_of_an_unknown_release_does_no_harm(elastic_log: logging.Logger) -> None:
    watching, _ = watch()
    elastic_log.error("failed (exitcode: unknown)")
    elastic_log.warning("Sending process %s", "nonsense")
    assert watching.take() == []


def started(context: type[Any], folder: Path, *commands: str) -> Any:
    """torchrun's own context of ranks that run these shell commands."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs

    ranks = range(len(commands))
    context = context(
        name="rank",
        entrypoint="sh",
        args={rank: ("-c", command) for rank, command in enumerate(commands)},
        envs={rank: {} for rank in ranks},
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
    )
    context.start()
    return context


class Agent:
    """torchrun's elastic agent, as far as it is read."""

    def __init__(self, context: Any) -> None:
        self._pcontext = context

    def rendezvous(self, watching: ExitWatch) -> list[RankExit]:
        return watching.take()


def test_a_rank_that_died_just_before_torchrun_stopped_all_is_not_forgotten(
    elastic_log: logging.Logger, tmp_path: Path
) -> None:
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    watching, _ = watch()
    context = started(SubprocessContext, tmp_path, "kill -KILL $$", "exit 3", "exit 0", "exec sleep 1000")
    for rank in range(3):
        # torchrun has not looked at them since.
        os.waitid(os.P_PID, context.pids()[rank], os.WEXITED | os.WNOWAIT)
    context.close(signal.SIGTERM)
    killed, failed = Agent(context).rendezvous(watching)
    assert (killed.local_rank, killed.global_rank, killed.signal, killed.pid) == (0, 10, 9, context.pids()[0])
    assert (failed.local_rank, failed.exit_code) == (1, 3)


def test_a_rank_whose_failure_torchrun_has_logged_is_known_once(elastic_log: logging.Logger, tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    watching, _ = watch()
    context = started(SubprocessContext, tmp_path, "exit 3", "exec sleep 1000")
    os.waitid(os.P_PID, context.pids()[0], os.WEXITED | os.WNOWAIT)
    assert context.wait(0) is not None
    assert [one.local_rank for one in Agent(context).rendezvous(watching)] == [0]
    assert Agent(SimpleNamespace(subprocess_handlers={}, _running_local_ranks={0})).rendezvous(watching) == []


ENDED = RankExit(local_rank=0)


def read(folder: Path, content: str) -> RankExit:
    """A rank's exit with this error file."""
    (folder / "error.json").write_text(content)
    return with_error(ENDED, folder / "error.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"message": "plain"}, "plain"),
        ({"message": {"message": "RuntimeError: x", "extraInfo": {"timestamp": "12"}}}, "RuntimeError: x"),
        ({"message": {"message": "no extra"}}, "no extra"),
        ({"message": 3}, None),
        ([], None),
    ],
)
def test_error_files_of_all_forms(tmp_path: Path, content: Any, message: str | None) -> None:
    assert read(tmp_path, json.dumps(content)).error == message


def test_error_files_that_are_missing_or_broken(tmp_path: Path) -> None:
    assert read(tmp_path, '{"message"') == ENDED
    assert with_error(ENDED, tmp_path / "none.json") == ENDED
    assert with_error(ENDED, None) == ENDED


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[" * 100_000, ENDED),
        ("null", ENDED),
        ('{"message": 5}', ENDED),
        (r'{"message": "caf\udce9 \u0000"}', RankExit(local_rank=0, error="caf\\udce9 \0")),
        ('{"message": {"message": ["x"], "extraInfo": "y"}}', RankExit(local_rank=0, error="['x']")),
        (
            '{"message": {"extraInfo": {"py_callstack": 1, "timestamp": "x", "perdure_time": NaN}}}',
            RankExit(local_rank=0, error=""),
        ),
        ('{"message": {"extraInfo": {"timestamp": "1700000000"}}}', RankExit(local_rank=0, error="", time=1.7e9)),
    ],
)
def test_error_files_with_anything_in_them(tmp_path: Path, content: str, expected: RankExit) -> None:
    assert read(tmp_path, content) == expected


def test_an_exception_whose_text_cannot_be_made_is_named(tmp_path: Path) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    ended = read(tmp_path, json.dumps(error_content(Mute(), "stack")))
    assert ended.error == "Mute: <its text cannot be made>"


def test_long_errors_are_cut(tmp_path: Path) -> None:
    ended = read(tmp_path, json.dumps(error_content(ValueError("x" * 9000), "y" * 9000)))
    assert (len(ended.error or ""), len(ended.traceback or "")) == (500, 2000)


def test_exits_are_spooled_for_the_launcher_and_only_new_ones_count(tmp_path: Path) -> None:
    spool = ExitSpool(tmp_path / "rank-exits.json")
    assert spool.read(started_after=0) == ()
    spool.write([RankExit(local_rank=0, signal=9)])
    assert spool.read(started_after=time.time() - 60) == (RankExit(local_rank=0, signal=9),)
    assert spool.read(started_after=time.time() + 60) == ()
    spool.clear()
    spool.clear()
    assert spool.read(started_after=0) == ()


@pytest.mark.parametrize(
    "content",
    ["", "[1]", "{}", '{"exits": 5}', '{"exits": [5, {}, {"local_rank": "x"}, {"local_rank": 1, "signal": "x"}]}'],
)
def test_a_spool_that_a_rank_has_written_over_is_no_trouble(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rank-exits.json"
    path.write_text(content)
    kept = ExitSpool(path).read(started_after=0)
    assert kept == ((RankExit(local_rank=1),) if "signal" in content else ())


def test_the_state_survives_in_place(tmp_path: Path) -> None:
    state = StateFile(tmp_path)
    assert state.read() == RendezvousState()
    state.create()
    state.write(RendezvousState(handler_pid=12, generation=5))
    state.create()
    assert StateFile(tmp_path).read() == RendezvousState(handler_pid=12, generation=5)


def test_statuses_read_well() -> None:
    assert [describe_status(3, None), describe_status(None, 9), describe_status(None, 64)] == [
        "exit code 3",
        "SIGKILL",
        "SIGRTMAX",
    ]
    assert describe_status(None, 99) == "signal 99"
