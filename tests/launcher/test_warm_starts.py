"""Tests that forked ranks are equivalent to started ones: scripts and torchrun observe no difference."""

from __future__ import annotations

import ast
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.agent.progress import ProgressReader
from perdure.contract import RankStarts
from perdure_launcher.warm_start.starts import read_starts
from perdure_launcher.warm_start.supervisor import offer
from tests.launcher.nodes import (
    EXITED,
    FINISHED,
    READY,
    ROOT,
    TORCHRUN,
    Node,
    all_step,
    first_world,
    form_world,
    running,
)
from tests.launcher.test_torchrun_worlds import pair
from tests.launcher.warmth import STUB_TORCH, Warmth, interpreter_with, warmth
from tests.support.source import parse
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def script() -> Iterator[Warmth]:
    with warmth("looks.py", "looks") as found:
        yield found


@pytest.fixture(scope="module")
def script_with_torch() -> Iterator[Warmth]:
    with warmth("looks.py", "looks", "torch", real_torch=True) as found:
        yield found


def test_the_stub_is_a_part_of_torch() -> None:
    for path in sorted(STUB_TORCH.rglob("*.py")):
        module = path.relative_to(STUB_TORCH).with_suffix("")
        name = ".".join(module.parts).removesuffix(".__init__")
        real = importlib.import_module(name)
        tree = parse(path)
        made = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert {one for one in made if not hasattr(real, one)} == set(), name


@pytest.mark.long("warm-starts")
@pytest.mark.usefixtures("ranks")
def test_a_script_sees_the_same_whether_it_was_started_or_forked(script_with_torch: Warmth) -> None:
    script = script_with_torch
    warm, cold = script.run(), script.run(warm=False)
    assert script.last.warm, script.last
    seen, expected = json.loads(warm.stdout), json.loads(cold.stdout)
    assert {name: seen[name] for name in seen if seen[name] != expected[name]} == {}
    assert (warm.returncode, warm.stderr) == (cold.returncode, cold.stderr)
    assert seen["session"]


def test_a_module_sees_the_same_whether_it_was_started_or_forked() -> None:
    with warmth("-m", "looks", "looks") as module:
        module.arguments[:2], module.arguments[2:] = ["-u", "-m"], ["looks", "looks"]
        warm, cold = module.run(), module.run(warm=False)
        assert module.last.warm, module.last
        assert json.loads(warm.stdout) == json.loads(cold.stdout)
        assert warm.stderr == cold.stderr


@pytest.mark.parametrize(
    "ending",
    [
        ("exception",),
        ("text",),
        ("atexit",),
        ("code", "0"),
        ("code", "3"),
        ("code", "300"),
        ("signal", str(int(signal.SIGKILL))),
        ("signal", str(int(signal.SIGSEGV))),
        ("signal", str(int(signal.SIGTERM))),
        ("signal", str(int(signal.SIGINT))),
    ],
    ids=" ".join,
)
def test_it_ends_the_same(script: Warmth, ending: tuple[str, ...]) -> None:
    warm, cold = script.run(*ending), script.run(*ending, warm=False)
    assert script.last.warm, script.last
    assert (warm.returncode, warm.stdout, warm.stderr) == (cold.returncode, cold.stdout, cold.stderr)


@pytest.mark.parametrize(("script_does", "code"), [("wait", -signal.SIGTERM), ("handle", 5)])
def test_a_signal_to_the_stand_in_reaches_the_rank(script: Warmth, script_does: str, code: int) -> None:
    process = script.start(script_does)
    assert process.stdout is not None
    assert int(process.stdout.readline()) != process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == code


def test_forks_draw_different_numbers_from_python(script: Warmth) -> None:
    numbers: set[str] = set()
    for _ in range(2):
        numbers.add(script.run("numbers").stdout)
        assert script.last.warm, script.last
    assert len(numbers) == 2


@pytest.mark.long("warm-starts")
@pytest.mark.usefixtures("ranks")
def test_forks_draw_different_random_numbers(script_with_torch: Warmth) -> None:
    script = script_with_torch
    one, other = script.run("random").stdout.split(), script.run("random").stdout.split()
    assert len(one) >= 2
    assert not set(one) & set(other)


def test_a_killed_stand_in_takes_its_rank_along(script: Warmth) -> None:
    process = script.start("wait")
    assert process.stdout is not None
    ended = os.pidfd_open(int(process.stdout.readline()))
    process.kill()
    assert gone(ended)
    process.wait()


def test_a_killed_interpreter_takes_its_ranks_along_and_the_next_start_is_cold_until_it_is_back() -> None:
    with warmth("looks.py", "looks") as script:
        process = script.start("wait")
        assert process.stdout is not None
        ended = os.pidfd_open(int(process.stdout.readline()))
        script.supervisor.close()
        assert gone(ended)
        assert process.wait(timeout=30) == -signal.SIGKILL
        assert script.supervisor.start_ranks()
        script.supervisor.follow_ranks(lambda: False)
        assert script.run("code", "4").returncode == 4
        assert not script.last.warm
        assert "no warm interpreter" in script.last.reason
        script.supervisor.follow_ranks(lambda: True)
        assert not script.supervisor.follow_ranks(lambda: True)
        assert script.run("code", "4").returncode == 4
        assert script.last.warm, script.last


@pytest.mark.parametrize("name", ["an environment", "e" * 130])
def test_an_interpreter_that_no_script_can_name_in_its_first_line_starts_warm(tmp_path: Path, name: str) -> None:
    with warmth("looks.py", "looks", executable=interpreter_with({}, tmp_path / name)) as script:
        warm, cold = script.run(), script.run(warm=False)
        assert script.last.warm, script.last
        assert json.loads(warm.stdout) == json.loads(cold.stdout)


def test_a_folder_for_which_no_first_line_can_be_written_is_named(tmp_path: Path) -> None:
    python = str(tmp_path / "an environment" / "python")
    assert "a folder" in offer(tmp_path / "a folder", {}, python=python)


def gone(ended: int) -> bool:
    """Waits for the end of a process by its pidfd."""
    import select

    try:
        return bool(select.select([ended], [], [], 30)[0])
    finally:
        os.close(ended)


def test_another_environment_starts_cold(script: Warmth) -> None:
    ended = script.run("code", "6", environment={"OMP_NUM_THREADS": "3", "RANK": "5"})
    assert ended.returncode == 6
    assert not script.last.warm
    assert script.last.reason == "its environment differs in OMP_NUM_THREADS", script.log()


def test_other_limits_start_cold(script: Warmth) -> None:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1
    ended = script.run("code", "6", wrapper=["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh"])
    assert ended.returncode == 6
    assert "limits" in script.last.reason


def test_other_cores_start_cold(script: Warmth) -> None:
    one = min(os.sched_getaffinity(0))
    ended = script.run("code", "6", wrapper=["taskset", "-c", str(one)])
    assert ended.returncode == 6
    assert "Cpus_allowed" in script.last.reason


def test_files_that_are_passed_on_start_cold(script: Warmth) -> None:
    reading, writing = os.pipe()
    try:
        assert script.run("code", "6", pass_fds=[writing]).returncode == 6
    finally:
        os.close(reading)
        os.close(writing)
    assert "files beyond" in script.last.reason


def test_threads_of_an_import_make_it_unfit(tmp_path: Path) -> None:
    start = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "sitecustomize.py").write_text(f"import os, threading\nos.write(2, b'users own')\n{start}\n")
    with warmth("looks.py", "code", "6", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}") as script:
        ended = script.run()
        assert ended.returncode == 6
        assert ended.stderr.count("users own") == 1
        assert script.last.reason == "its imports started 1 threads, which a fork would lose", script.log()


def test_the_users_own_sitecustomize_runs_once(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.customized = os.environ.get('CUSTOM')\n")
    (tmp_path / "asks.py").write_text("import os, sitecustomize\nprint(os.customized, sitecustomize.__file__)\n")
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    with warmth(str(tmp_path / "asks.py"), PYTHONPATH=path, CUSTOM="yes") as script:
        warm = script.run()
        assert script.last.warm, script.last
        assert warm.stdout == f"yes {tmp_path / 'sitecustomize.py'}\n", warm.stderr


def test_an_import_that_fails_starts_cold(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('no torch today')\n")
    (tmp_path / "does_without.py").write_text("raise SystemExit(6)\n")
    with warmth(str(tmp_path / "does_without.py"), PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}") as script:
        assert script.run().returncode == 6
        assert "no torch today" in script.last.reason


def test_an_executable_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    environment = {"PYTHON_EXEC": "/opt/python"}
    assert "PYTHON_EXEC is set" in offer(tmp_path / "warm", environment)
    assert environment == {"PYTHON_EXEC": "/opt/python"}


def warm_ranks(node: Node, generation: int) -> dict[int, int]:
    """Processes of the ranks that were forked, by global rank, on nodes of one rank each."""
    starts = read_starts(node.run_directory / "warm", generation=generation, processes=1)
    return {rank: start.pid for rank, start in zip(node.ranks(generation), starts, strict=True) if start.warm}


@pytest.mark.long("warm-starts")
@pytest.mark.usefixtures("ranks")
async def test_the_ranks_of_a_torchrun_are_forked_and_a_killed_one_is_forked_again() -> None:
    nodes = pair()
    async with running(*nodes):
        ready = await first_world(nodes)
        victim = nodes[1].ranks()[1]
        assert warm_ranks(nodes[1], 1) == {1: victim}
        os.kill(victim, signal.SIGKILL)
        [culprit] = (await nodes[1].agent.heard(READY)).body["ranks"]
        assert (culprit["pid"], culprit["signal"]) == (victim, signal.SIGKILL)
        await form_world(nodes, 2, port=ready[0].body["store_ports"][1])
        await all_step(nodes, 2)
        for node in nodes:
            assert warm_ranks(node, 2) == node.ranks(2)
            (node.run_directory / "stop").touch()
        for node in nodes:
            await node.agent.heard(FINISHED)
            await node.agent.complete_generation(2)
        for node in nodes:
            assert (await node.agent.heard(EXITED)).body["exit_code"] == 0
            await node.agent.want(exit=True)
        for node in nodes:
            assert await node.left() == 0
            assert node.processes() == []


@pytest.mark.long("warm-starts")
@pytest.mark.usefixtures("ranks")
async def test_ranks_do_not_wait_for_a_killed_interpreter_and_have_one_again_after_their_first_steps() -> None:
    node = Node([*TORCHRUN, "train.py"])
    async with running(node):
        ready = await first_world([node])
        path = node.run_directory / "warm" / "pid"
        killed = int(path.read_text())
        os.kill(killed, signal.SIGKILL)
        [victim] = (await node.agent.heard(READY, lambda body: body["after_generation"] == 1)).body["ranks"]
        assert victim["signal"] == signal.SIGKILL
        await form_world([node], 2, port=ready[0].body["store_ports"][1])
        await all_step([node], 2)
        assert warm_ranks(node, 2) == {}
        await eventually(lambda: path.exists() and path.read_text() not in ("", str(killed)))
        os.kill(node.ranks()[0], signal.SIGKILL)
        await node.agent.heard(READY, lambda body: body["after_generation"] == 2)
        await form_world([node], 3, port=ready[0].body["store_ports"][2])
        await all_step([node], 3)
        assert warm_ranks(node, 3) == node.ranks(3)


@pytest.mark.long("warm-starts")
@pytest.mark.usefixtures("ranks")
async def test_a_node_that_a_shell_started_in_the_background_starts_warm_too() -> None:
    node = Node([*TORCHRUN, "train.py"])
    # As the shell does; what it ignores is ignored by all that it starts.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGQUIT)}
    try:
        await node.agent.start()
        node.launch()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    try:
        await first_world([node])
        assert warm_ranks(node, 1) == node.ranks(1)
    finally:
        await node.close()


@pytest.mark.long("warm-starts")
@pytest.mark.usefixtures("ranks")
async def test_warm_starts_can_be_turned_off() -> None:
    nodes = pair(warm_starts=False)
    async with running(*nodes):
        await first_world(nodes)
        assert not (nodes[0].run_directory / "warm").exists()


@pytest.mark.long("warm-starts")
@pytest.mark.usefixtures("ranks")
async def test_ranks_that_torchrun_starts_without_python_are_cold_and_recover() -> None:
    node = Node([*TORCHRUN, "--no-python", sys.executable, "-u", "train.py"])
    async with running(node):
        ready = await first_world([node])
        starts = ProgressReader(node.run_directory).starts(generation=1, processes=1)
        assert starts == RankStarts(cold=1, reason=f"torchrun starts {sys.executable} itself (--no-python)")
        os.kill(node.ranks()[0], signal.SIGKILL)
        await node.agent.heard(READY)
        await form_world([node], 2, port=ready[0].body["store_ports"][1])
        await all_step([node], 2)


@pytest.mark.long("warm-starts")
@pytest.mark.usefixtures("ranks")
async def test_a_world_that_is_over_leaves_no_forked_rank_behind() -> None:
    node = Node([sys.executable, "-m", "torch.distributed.run", "stubborn.py"], stop_grace_s=0.3)
    async with running(node):
        ready = await first_world([node])
        old = node.ranks()[0]
        await form_world([node], 2, port=ready[0].body["store_ports"][1])
        await all_step([node], 2)
        assert not Path(f"/proc/{old}").exists()
