"""The installed torch has the undocumented parts that Perdure uses, and a torch without one of them does no harm."""

from __future__ import annotations

import inspect
import logging
import signal
import socket
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server import api as agents
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry
from torch.distributed.launcher import api as launcher

from perdure_launcher import torch_internals


def test_torchruns_frames_hold_what_is_read_there() -> None:
    parameters = inspect.signature(launcher.launch_agent).parameters
    assert {"config", "entrypoint", "args"} <= parameters.keys()
    assert "nproc_per_node" in launcher.LaunchConfig.__dataclass_fields__
    assert {
        "master_addr",
        "master_port",
        "max_restarts",
        "rdzv_handler",
    } <= agents.WorkerSpec.__dataclass_fields__.keys()
    assert "_remaining_restarts" in inspect.getsource(agents.SimpleElasticAgent)


def test_torchrun_logs_failures_and_terminations_as_they_are_read() -> None:
    assert multiprocessing.logger.name == torch_internals.MULTIPROCESSING_LOGGER
    source = inspect.getsource(multiprocessing)
    assert '"failed (exitcode: %s)"' in source
    assert "Closing process %s via signal %s" in source
    context = inspect.getsource(multiprocessing.SubprocessContext)
    assert all(name in context for name in ("_failures", "_running_local_ranks", "subprocess_handlers"))
    assert "self._pcontext" in inspect.getsource(LocalElasticAgent)
    assert issubclass(multiprocessing.SignalException, Exception)
    assert {"local_rank", "pid", "exitcode", "error_file"} <= ProcessFailure.__dataclass_fields__.keys()


def test_a_handler_takes_the_place_of_every_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {"c10d": object(), "static": object()}
    monkeypatch.setattr(rendezvous_handler_registry, "_registry", known)

    def create(parameters: Any) -> Any:
        raise NotImplementedError

    torch_internals.replace_rendezvous_backends(create)
    assert known == {"c10d": create, "static": create}


def test_a_store_is_served_on_a_socket_that_listens() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port: int = listening.getsockname()[1]
    served = torch_internals.serve_store("127.0.0.1", port, listening)
    client = TCPStore("127.0.0.1", port, is_master=False)
    client.set("key", "value")
    assert served.get("key") == b"value"


def test_torchrun_signals_programs_once_and_kills_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SubprocessHandler, "close", SubprocessHandler.close)
    signaled: list[tuple[int, signal.Signals]] = []
    torch_internals.signal_programs(lambda pid, number: signaled.append((pid, number)))
    rank = SubprocessHandler("sh", ("-c", "sleep 1000 & wait"), {}, None, None, 0, None)
    other = SubprocessHandler("sleep", ("1000",), {}, None, None, 1, None)
    # torchrun's own signals may interrupt the first attempt to end the ranks.
    for number in (None, signal.SIGTERM):
        rank.close(number)
    other.close(signal.SIGINT)
    assert signaled == [(rank.proc.pid, signal.SIGTERM), (other.proc.pid, signal.SIGINT)]
    assert rank.proc.poll() is None
    rank.close(signal.SIGKILL)
    assert rank.proc.wait() == -signal.SIGKILL
    other.close(signal.SIGKILL)
    assert other.proc.wait() == -signal.SIGKILL


def test_process_groups_and_plugins_have_their_functions() -> None:
    assert {"env", "tcp"} <= torch_internals.process_group_handlers().keys()
    assert callable(torch_internals.plugin_loader())


def test_outside_of_torchrun_nothing_is_found_and_nothing_changes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handler: Any = object()
    assert torch_internals.current_launch() is None
    torch_internals.detach_from_flags(handler)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    monkeypatch.delattr(torch, "_import_device_backends")
    assert torch_internals.plugin_loader() is None


def test_flags_of_the_command_are_taken_out_of_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    class Spec:
        def __init__(self, handler: object) -> None:
            self.rdzv_handler = handler
            self.master_addr: str | None = "10.0.0.9"
            self.master_port: int | None = 29500
            self.max_restarts = 3

    class Agent:
        _remaining_restarts = 2

        def rendezvous(self, spec: Spec) -> None:
            torch_internals.detach_from_flags(handler)

    handler: Any = object()
    spec, agent = Spec(handler), Agent()
    monkeypatch.setattr("sys.argv", ["torchrun", "train.py"])
    agent.rendezvous(spec)
    assert (spec.master_addr, spec.master_port) == (None, None)
    unlimited = torch_internals.UNLIMITED_RESTARTS
    assert (spec.max_restarts, agent._remaining_restarts) == (unlimited, unlimited - 1)
    spec = Spec(handler)
    monkeypatch.setattr("sys.argv", ["torchrun", "--max-restarts=3", "train.py"])
    agent.rendezvous(spec)
    assert spec.max_restarts == 3


def test_records_of_another_kind_are_passed_over() -> None:
    record = logging.LogRecord("x", logging.ERROR, __file__, 1, "something else %s", (1,), None)
    assert torch_internals.logged_failures(record, terminated=(), exit_of=lambda *_: None) == []
    assert torch_internals.finished_before(record) == []
    assert torch_internals.logged_termination(record) is None
    assert not torch_internals.torchrun_is_terminated()
