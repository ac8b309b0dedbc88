"""Tests of calls from one role to another, over real connections."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure_training import roles
from perdure_training.node_api.agent_client import Agent
from perdure_training.node_api.layout import PROGRESS
from perdure_training.node_api.layout import ROLES as FILE
from perdure_training.roles import rpc
from perdure_training.store import JobStore, StoreError
from tests.support.temporal_server import free_port
from tests.training.agent_in_thread import AgentInThread, agent_in_thread

SOON = timedelta(seconds=0.3)


class Reward:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.going_on = threading.Event()

    def score(self, trajectory: list[float], *, scale: float = 1) -> float:
        self.calls.append(trajectory)
        return scale * sum(trajectory)

    def fail(self) -> None:
        raise ValueError("no such trajectory")

    def block(self) -> None:
        self.calls.append("blocked")
        self.going_on.wait(30)

    def result_that_is_no_pickle(self) -> object:
        return lambda: None

    def result_of_one_script(self) -> OfOneScript:
        return OfOneScript()

    def _hidden(self) -> None: ...


class Exploit:
    """A pickle that runs code where it is read."""

    def __reduce__(self) -> Any:
        return exec, ("import os; os.environ['PERDURE_TEST_EXPLOITED'] = '1'",)


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setattr(rpc, "_job_secret", lambda: b"the job's secret")
    monkeypatch.setattr(rpc, "_renewed_secret", lambda used: b"the job's secret")
    return b"the job's secret"


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    for name, value in {"PROGRESS_DIR": str(tmp_path / PROGRESS), "ROLE": "reward", "GENERATION": "1"}.items():
        monkeypatch.setenv(f"PERDURE_{name}", value)

    def tell(*ports: int, ready: bool = True) -> None:
        addresses = [f"127.0.0.1:{port}" if port else "" for port in ports]
        known = {"addresses": addresses, "generation": 1, "processes": len(ports), "ready": ready}
        (tmp_path / FILE).write_text(
            json.dumps({"reward": known, "trainer": {"addresses": ["127.0.0.1"], "ready": True}})
        )

    return tell


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], Reward]]:
    servers: list[Any] = []
    started = rpc._Server.serve_forever

    def serve_forever(self: Any, poll_interval: float = 0.5) -> None:
        servers.append(self)
        started(self, 0.01)

    monkeypatch.setattr(rpc._Server, "serve_forever", serve_forever)

    def serve(port: int, rank: int = 0) -> Reward:
        monkeypatch.setenv("PERDURE_PORT", str(port))
        monkeypatch.setenv("RANK", str(rank))
        reward = Reward()
        roles.export(reward)
        return reward

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def reward(secret: bytes, tell: Callable[..., None], serve: Callable[..., Reward]) -> Reward:
    port = free_port()
    tell(port)
    return serve(port)


def test_a_method_is_called_with_its_arguments_and_its_result_returns(reward: Reward):
    assert roles.call("reward", "score", [1.0, 2.0], scale=2) == 6
    assert reward.calls == [[1.0, 2.0]]


def test_all_processes_are_called_or_one_of_them(
    secret: bytes, tell: Callable[..., None], serve: Callable[..., Reward]
):
    ports = [free_port(), free_port()]
    tell(*ports)
    rewards = [serve(port, rank) for rank, port in enumerate(ports)]
    assert roles.call("reward", "score", [1.0], rank="all") == [1.0, 1.0]
    assert roles.call("reward", "score", [2.0], rank=1) == 2
    assert [reward.calls for reward in rewards] == [[[1.0]], [[1.0], [2.0]]]
    with pytest.raises(roles.RoleUnavailable, match="rank 2 of role reward has no address"):
        roles.call("reward", "score", [1.0], rank=2)


def listens_at(monkeypatch: pytest.MonkeyPatch, own: str | None, *hosts: str) -> list[bool]:
    """Whether an exported object is reached at each host, where the node knows its own address as given."""
    monkeypatch.delenv("PERDURE_NODE_ADDRESS", raising=False)
    if own is not None:
        monkeypatch.setenv("PERDURE_NODE_ADDRESS", own)
    server = rpc._Server(free_port(), Reward(), b"secret", renewed=lambda used: used)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    found: list[bool] = []
    try:
        for host in hosts:
            try:
                socket.create_connection((host, server.server_address[1]), 5).close()
            except OSError:
                found.append(False)
            else:
                found.append(True)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    return found


IPV6 = rpc._can_listen(socket.AF_INET6, "::1")


@pytest.mark.parametrize("own", ["192.0.2.7", "2001:db8::7", "worker-1.example", "", None])
def test_a_node_that_has_not_the_address_it_is_reached_at_listens_at_all(
    own: str | None, monkeypatch: pytest.MonkeyPatch
):
    """An address that is translated, a name that its name server still has for an earlier pod."""
    assert listens_at(monkeypatch, own, "127.0.0.1", "::1") == [True, IPV6]


@pytest.mark.skipif(not IPV6, reason="no IPv6 on this machine")
def test_a_node_listens_at_its_own_address_alone_where_it_has_one(monkeypatch: pytest.MonkeyPatch):
    assert listens_at(monkeypatch, "127.0.0.1", "127.0.0.1", "::1") == [True, False]
    assert listens_at(monkeypatch, "::1", "127.0.0.1", "::1") == [False, True]


@pytest.mark.skipif(not IPV6, reason="no IPv6 on this machine")
def test_a_role_is_called_at_an_address_of_ipv6(
    secret: bytes,
    tell: Callable[..., None],
    serve: Callable[..., Reward],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("PERDURE_NODE_ADDRESS", "::1")
    port = free_port()
    serve(port)
    tell(port)
    (tmp_path / FILE).write_text((tmp_path / FILE).read_text().replace("127.0.0.1:", "[::1]:"))
    assert roles.call("reward", "score", [1.0]) == 1


def test_a_role_without_one_of_its_nodes_is_called_by_the_ranks_of_the_others(
    secret: bytes, tell: Callable[..., None], serve: Callable[..., Reward]
):
    port = free_port()
    tell(0, port)
    serve(port, 1)
    assert roles.call("reward", "score", [1.0], rank=1) == 1
    assert roles.call("reward", "score", [1.0], rank="all") == [1.0]
    with pytest.raises(roles.RoleUnavailable, match="rank 0 of role reward has no address"):
        roles.call("reward", "score", [1.0])


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        ("fail", r"reward\.fail, rank 0: Traceback(.|\n)*ValueError: no such trajectory"),
        ("_hidden", "Reward has no public method '_hidden'"),
        ("missing", "Reward has no public method 'missing'"),
        ("calls", "Reward has no public method 'calls'"),
        ("result_that_is_no_pickle", "pickle"),
    ],
)
def test_what_the_method_raises_is_said_to_the_caller(reward: Reward, method: str, problem: str):
    with pytest.raises(roles.CallFailed, match=problem):
        roles.call("reward", method)


class OfOneScript:
    """A class that only one of the two scripts has, whichever reads it."""

    def __reduce__(self) -> Any:
        return getattr, ("a module", "what_only_one_script_has")


def test_what_only_one_of_the_scripts_can_read_is_said_to_the_caller(reward: Reward):
    with pytest.raises(roles.CallFailed, match=r"was not called.* in a module that both scripts import"):
        roles.call("reward", "score", OfOneScript())
    assert reward.calls == []
    with pytest.raises(roles.CallFailed, match=r"was carried out.* in a module that both scripts import"):
        roles.call("reward", "result_of_one_script")
    assert roles.call("reward", "score", [1.0]) == 1.0


def test_an_answer_that_does_not_come_ends_with_a_timeout_and_is_not_asked_for_again(reward: Reward):
    with pytest.raises(roles.CallTimeout, match=r"reward\.block: no answer within 0:00:00\.3"):
        roles.call("reward", "block", timeout=SOON)
    reward.going_on.set()
    assert roles.call("reward", "score", [1.0]) == 1
    assert reward.calls == ["blocked", [1.0]]


def test_a_role_that_recovers_is_named_with_its_state(secret: bytes, tell: Callable[..., None]):
    tell(ready=False)
    with pytest.raises(roles.RoleUnavailable, match=r"role reward is not ready: it starts or recovers \(generation 1"):
        roles.call("reward", "score", [1.0])
    tell(free_port())
    with pytest.raises(roles.RoleUnavailable, match=r"is not reached: .*; role reward is ready"):
        roles.call("reward", "score", [1.0])
    with pytest.raises(roles.RoleUnavailable, match="rank 0 of role trainer has no address with a port"):
        roles.call("trainer", "score", [1.0])
    with pytest.raises(KeyError, match="role other"):
        roles.call("other", "score", [1.0])


def test_a_call_waits_for_a_role_that_recovers_if_it_may(
    secret: bytes, tell: Callable[..., None], serve: Callable[..., Reward]
):
    port = free_port()
    tell(port, ready=False)
    begun = time.monotonic()
    threading.Timer(0.3, lambda: (serve(port), tell(port))).start()
    assert roles.call("reward", "score", [1.0], wait=timedelta(seconds=60)) == 1
    assert time.monotonic() - begun >= 0.3


def test_a_connection_that_is_lost_is_said_and_the_call_is_not_repeated(secret: bytes, tell: Callable[..., None]):
    with socket.create_server(("127.0.0.1", 0)) as dies:
        tell(dies.getsockname()[1])
        connections: list[int] = []

        def end() -> None:
            while True:
                try:
                    connection, _ = dies.accept()
                except OSError:
                    return
                connections.append(1)
                connection.sendall(bytes(32))
                connection.recv(1)
                connection.close()

        threading.Thread(target=end, daemon=True).start()
        with pytest.raises(roles.RoleUnavailable, match="may have been carried out"):
            roles.call("reward", "score", [1.0])
        assert connections == [1]


def test_a_sender_without_the_secret_is_refused_before_anything_is_unpickled(
    reward: Reward, monkeypatch: pytest.MonkeyPatch
):
    exploit = pickle.dumps(Exploit())
    for content in (b"", b"x" * 200, bytes(104) + exploit):
        address = ("127.0.0.1", int(roles.addresses("reward")[0].rpartition(":")[2]))
        # The server closes the connection as soon as it has read enough, which any of these may notice.
        with suppress(OSError), socket.create_connection(address) as stranger:
            stranger.sendall(content)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    monkeypatch.setattr(rpc, "_job_secret", lambda: b"a guess")
    monkeypatch.setattr(rpc, "_renewed_secret", lambda used: used)
    with pytest.raises(roles.RoleUnavailable):
        roles.call("reward", "score", [1.0])
    assert reward.calls == []
    assert "PERDURE_TEST_EXPLOITED" not in os.environ


def test_strangers_that_say_nothing_are_bounded_and_keep_no_caller_out(reward: Reward, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rpc, "_PROOF_WITHIN", 600.0)
    address = ("127.0.0.1", int(roles.addresses("reward")[0].rpartition(":")[2]))
    with ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(address, 60)) for _ in range(rpc._STRANGERS + 8)]
        assert roles.call("reward", "score", [1.0]) == 1
        for one in strangers[:8]:
            # Its nonce, and then the end, long before it would have to have proved itself.
            received = b"".join(iter(lambda one=one: one.recv(64), b""))
            assert len(received) in (0, 32)
        assert roles.call("reward", "score", [2.0]) == 2


def test_a_caller_that_has_proved_itself_is_not_ended_for_others(
    secret: bytes, reward: Reward, monkeypatch: pytest.MonkeyPatch
):
    proven, remove = threading.Event(), rpc.Strangers.remove

    def note(strangers: rpc.Strangers, connection: socket.socket) -> None:
        remove(strangers, connection)
        proven.set()

    monkeypatch.setattr(rpc.Strangers, "remove", note)
    address = ("127.0.0.1", int(roles.addresses("reward")[0].rpartition(":")[2]))
    content = pickle.dumps(rpc._Request("score", ([1.0, 2.0],), {}))
    with ExitStack() as stack:
        caller = stack.enter_context(socket.create_connection(address, 60))
        theirs, ours, digest = rpc._receive_exactly(caller, 32), bytes(32), hashlib.sha256(content).digest()
        code = rpc._code(secret, b"request", ours, theirs, len(content), digest)
        caller.sendall(rpc._HEADER.pack(ours, len(content), digest, code) + content[:1])
        assert proven.wait(60)
        strangers = [stack.enter_context(socket.create_connection(address, 60)) for _ in range(rpc._STRANGERS + 8)]
        assert rpc._receive_exactly(strangers[-1], 32)
        caller.sendall(content[1:])
        assert pickle.loads(rpc._receive(caller, secret, b"answer", ours)).result == 3


def test_a_message_counts_for_its_own_connection_and_direction_only(secret: bytes):
    ends = socket.socketpair()
    try:
        ours, theirs, content = b"o" * 32, b"t" * 32, b"content"
        for direction, nonce, received in [
            (b"request", theirs, b"content"),
            (b"answer", theirs, None),
            (b"request", b"x" * 32, None),
        ]:
            rpc._send(ends[0], secret, b"request", ours, theirs, content)
            if received is None:
                with pytest.raises(rpc._Refused):
                    rpc._receive(ends[1], secret, direction, nonce)
                ends[1].recv(len(content))
            else:
                assert rpc._receive(ends[1], secret, direction, nonce) == received
    finally:
        for end in ends:
            end.close()


def test_a_role_without_a_port_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PERDURE_PORT", raising=False)
    with pytest.raises(RuntimeError, match="give it `ready"):
        roles.export(Reward())


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch, tell: Callable[..., None]) -> Iterator[AgentInThread]:
    """The node's agent, and the job's store, which this process has not called yet."""
    with agent_in_thread() as agent:
        monkeypatch.setattr(rpc, "JobStore", lambda **fields: JobStore(agent=Agent(agent.path), **fields))
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setattr(rpc, "_known", rpc._KnownSecret())
        yield agent


def of_another_process() -> Any:
    """What a process that starts now knows."""
    return rpc._KnownSecret()


def test_the_secret_is_the_same_for_all_roles_of_a_job(agent: AgentInThread):
    first = rpc._job_secret()
    assert of_another_process().value() == first
    assert len(first) == 64


def test_a_process_that_starts_after_the_store_has_begun_anew_calls_one_from_before(
    agent: AgentInThread, tell: Callable[..., None], serve: Callable[..., Reward], monkeypatch: pytest.MonkeyPatch
):
    port = free_port()
    tell(port)
    reward = serve(port)
    assert roles.call("reward", "score", [1.0]) == 1
    agent.begin_anew()
    caller = of_another_process()
    caller.value()
    monkeypatch.setattr(rpc, "_job_secret", caller.value)
    monkeypatch.setattr(rpc, "_renewed_secret", caller.renewed)
    assert roles.call("reward", "score", [2.0]) == 2
    assert reward.calls == [[1.0], [2.0]]


def test_a_process_from_before_calls_one_that_started_after_the_store_had_begun_anew(
    agent: AgentInThread, tell: Callable[..., None], serve: Callable[..., Reward], monkeypatch: pytest.MonkeyPatch
):
    before = rpc._known
    before.value()
    agent.begin_anew()
    monkeypatch.setattr(rpc, "_known", of_another_process())
    port = free_port()
    tell(port)
    reward = serve(port)
    monkeypatch.setattr(rpc, "_job_secret", before.value)
    monkeypatch.setattr(rpc, "_renewed_secret", before.renewed)
    with pytest.raises(roles.RoleUnavailable, match=r"the job's store has begun anew .* Call again"):
        roles.call("reward", "score", [1.0])
    assert reward.calls == []
    assert roles.call("reward", "score", [1.0]) == 1


def test_processes_from_before_keep_their_secret_where_none_has_started_since(agent: AgentInThread):
    first = rpc._job_secret()
    agent.begin_anew()
    assert rpc._renewed_secret(first) == first
    assert of_another_process().value() == first


def test_a_stranger_has_the_store_asked_once_in_a_while(agent: AgentInThread):
    first = rpc._job_secret()
    calls = agent.calls
    assert {rpc._renewed_secret(first) for _ in range(20)} == {first}
    assert agent.calls == calls + 1


def test_a_store_that_does_not_answer_leaves_the_secret_as_it_is(agent: AgentInThread, monkeypatch: pytest.MonkeyPatch):
    first = rpc._job_secret()

    def away(**_: Any) -> JobStore:
        raise StoreError("the agent is away")

    monkeypatch.setattr(rpc, "JobStore", away)
    assert rpc._renewed_secret(first) == first
