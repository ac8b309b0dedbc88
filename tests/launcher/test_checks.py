"""Tests of what the launcher measures of its machine: real folders, names and processes."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from perdure_launcher.config import LauncherConfig
from perdure_launcher.probes import checks, torch_checks
from perdure_training.node_api.addresses import host_and_port
from perdure_training.node_api.bodies import CheckFigure, CheckRequest
from tests.support.small_disks import small_disk


@pytest.fixture
def config(tmp_path: Path) -> LauncherConfig:
    return LauncherConfig(
        command=(sys.executable, "train.py"), run_id="r", run_directory=tmp_path, env={}, workdir=tmp_path
    )


def checked(config: LauncherConfig, *, kind: str = "quick", **environment: str) -> dict[tuple[str, str], CheckFigure]:
    figures = checks.run(config, CheckRequest(kind=kind), {**os.environ, **environment})
    return {(figure.name, figure.subject): figure for figure in figures}


def test_quick_checks_measure_and_leave_nothing_behind(config: LauncherConfig, tmp_path: Path):
    found = checked(config)
    assert {name for name, _ in found} == {"processor", "memory", "names", "room", "disk"}
    assert not [figure for figure in found.values() if figure.problem or not figure.value]
    assert not list(tmp_path.iterdir())


def test_a_full_folder_has_failed_with_its_reason(config: LauncherConfig, tmp_path: Path):
    with small_disk(tmp_path / "small", "1m") as folder:
        found = checked(config, TMPDIR=str(folder))
    assert found["disk", "temporary folder"].problem == f"{folder}: No space left on device"
    assert (found["room", "temporary folder"].value or 0) < 2
    assert not found["disk", "run directory"].problem


def test_a_folder_that_cannot_be_written_has_failed_with_its_reason(config: LauncherConfig):
    assert "/proc" in checked(config, TMPDIR="/proc")["disk", "temporary folder"].problem


def test_the_watched_folder_is_checked_before_it_exists(tmp_path: Path):
    config = LauncherConfig(
        command=("python",), run_id="r", run_directory=tmp_path, env={}, watch=str(tmp_path / "saves" / "new")
    )
    assert not checked(config)["disk", "checkpoint.watch"].problem
    assert not (tmp_path / "saves").exists()


def test_a_check_that_does_not_end_in_time_has_failed(config: LauncherConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "CHECK_WITHIN", 2.0)
    monkeypatch.setattr(checks, "_resolve", threading.Event().wait)
    found = {name: figure for (name, _), figure in checked(config).items()}
    assert found["names"].problem == "it has not ended within 2 s"
    assert found["names"].seconds >= 2
    assert not found["memory"].problem


@pytest.mark.long("launchers")
def test_devices_are_measured_by_the_interpreter_of_the_command(config: LauncherConfig):
    figure = checked(config, kind="full")["matmul", "cpu"]
    assert (figure.problem, figure.unit) == ("", "GFLOP/s")
    assert (figure.value or 0) > 0.1


def test_the_program_of_torchs_checks_measures_each_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(torch_checks, "_devices", lambda: ["cpu"])
    torch_checks.main([])
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("value") > 0.1
    assert printed == {"name": "matmul", "subject": "cpu", "unit": "GFLOP/s"}


def test_an_interpreter_without_torch_is_a_failed_check_with_its_reason(config: LauncherConfig, tmp_path: Path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    figure = checked(config, kind="full", PYTHONPATH=str(tmp_path))["matmul", ""]
    assert figure.problem == "ImportError: no torch here"


def test_a_process_that_does_not_end_is_ended(config: LauncherConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "TORCH_WITHIN", 1.0)
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    figure = checked(config, kind="full", PYTHONPATH=str(tmp_path))["matmul", ""]
    assert figure.problem == "it has not ended within 1 s"


def test_output_that_is_no_figure_is_left_out(config: LauncherConfig, tmp_path: Path):
    lines = ("hello", "[1]", '{"name": "matmul", "value": 1.0}', '{"unknown": 1}')
    (tmp_path / "torch.py").write_text(f"print({chr(10).join(lines)!r}, flush=True); raise SystemExit")
    assert list(checked(config, kind="full", PYTHONPATH=str(tmp_path)))[-1] == ("matmul", "")


@pytest.mark.parametrize(("seconds", "measured"), [(0.02, 7), (1.7, 1)])
def test_what_a_slow_link_takes_is_measured_once(seconds: float, measured: int, monkeypatch: pytest.MonkeyPatch):
    clock, sizes = [0.0], list[int]()

    def all_reduce(numbers: torch.Tensor, **_: Any) -> None:
        sizes.append(numbers.numel())
        clock[0] += seconds * numbers.numel() / 2**22

    monkeypatch.setattr(torch_checks.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch_checks.dist, "all_reduce", all_reduce)
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(torch_checks.dist, name, lambda *_, **__: None)
    assert torch_checks._exchange("10.0.0.1:20000", 0) == pytest.approx(2**24 / 1e6 / seconds)
    assert sizes.count(2**22) == measured


@pytest.mark.parametrize(("given", "used"), [({}, "lo"), ({"GLOO_SOCKET_IFNAME": "eth7"}, "eth7")])
def test_a_link_is_measured_over_the_interface_of_the_ranks(
    config: LauncherConfig, given: dict[str, str], used: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    (tmp_path / "torch.py").write_text("import os; raise ImportError(os.environ.get('GLOO_SOCKET_IFNAME'))")
    request = CheckRequest(kind="link", address="127.0.0.1", port=20_000, rank=0)
    [figure] = checks.run(config, request, {**os.environ, **given, "PYTHONPATH": str(tmp_path)})
    assert figure.problem == f"ImportError: {used}"


@pytest.mark.parametrize(
    ("address", "url"), [("fd00::1", "tcp://[fd00::1]:20000"), ("10.0.0.1", "tcp://10.0.0.1:20000")]
)
def test_a_link_is_measured_over_ipv6_too(address: str, url: str, monkeypatch: pytest.MonkeyPatch):
    used: list[str] = []
    monkeypatch.setattr(torch_checks.dist, "init_process_group", lambda *_, init_method, **__: used.append(init_method))
    for name in ("all_reduce", "destroy_process_group"):
        monkeypatch.setattr(torch_checks.dist, name, lambda *_, **__: None)
    torch_checks._exchange(host_and_port(address, 20_000), 0)
    assert used == [url]
