"""Tests of the launcher with commands of any kind: started, supervised, ended, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.workflows.policy.diagnosis.error_texts import is_child_lost
from tests.launcher.nodes import DEADLINE, EXITED, READY, TORCHRUN, Node, all_ready, form_world, running
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(300)

LONG = pytest.mark.long("launchers")

PYTHON = shlex.quote(sys.executable)


def command_of(script: str, **config: object) -> Node:
    """A node whose command is a shell script, treated like torchrun: started once, watched as a whole."""
    return Node(["bash", "-c", script], rendezvous="torchrun", **config)


async def test_output_exit_code_and_log_tail_are_reported_and_the_launcher_lives_on() -> None:
    node = command_of("echo out; echo err >&2; exit 7")
    async with running(node):
        hello = await node.agent.heard("/v1/launcher/hello")
        assert hello.body["protocol"] == 1
        exited = await node.agent.heard(EXITED)
        assert (exited.body["attempt"], exited.body["exit_code"], exited.body["signal"]) == (1, 7, None)
        assert exited.body["log_tail"] == "out\nerr\n"
        await eventually(lambda: node.output == "out\nerr\n")
        assert (node.run_directory / "logs" / "output.log").stat().st_mode & 0o777 == 0o644
        await node.agent.want(attempt=2)
        assert (await node.agent.heard(EXITED)).body["attempt"] == 2
        await node.agent.want(exit=True, reason="done with it")
        assert await node.left() == 0
        left = json.loads((node.run_directory / "exit.json").read_text())
        assert (left["exit_code"], left["signal"], left["reason"]) == (0, None, "done with it")


async def test_the_log_names_the_command_without_its_secrets() -> None:
    node = Node(["true", "--token", "hunter2"], rendezvous="torchrun")
    async with running(node):
        await node.agent.heard(EXITED)
        assert "runs in torchrun mode: true --token [redacted]" in node.launcher_log
        assert "hunter2" not in node.launcher_log


@pytest.mark.parametrize(
    ("command", "workdir", "exit_code", "text"),
    [
        (["torchrn", "train.py"], None, 127, "command not found: 'torchrn'"),
        (["./missing.sh"], None, 127, "command not found: './missing.sh'"),
        (["./train.py"], None, 126, "command not executable: './train.py'; use chmod +x"),
        (["true"], "/no/such/folder", 126, "workdir: /no/such/folder does not exist"),
    ],
)
async def test_a_command_that_cannot_start_is_explained(
    command: list[str], workdir: str | None, exit_code: int, text: str
) -> None:
    node = Node(command, rendezvous="torchrun", **({"workdir": workdir} if workdir else {}))
    async with running(node):
        exited = await node.agent.heard(EXITED)
        assert exited.body["exit_code"] == exit_code
        assert text in exited.body["message"]
        assert text in exited.body["log_tail"]
        await eventually(lambda: text in node.output)


async def test_a_command_that_dies_takes_daemons_and_orphans_along() -> None:
    script = (
        "setsid sleep 1000 & (setsid setsid sleep 1001 &) ; "
        f"{PYTHON} -c \"import signal,time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); "
        'time.sleep(1002)" & sleep 0.2; while ! [ -e go ]; do sleep 0.05; done; kill -9 $$'
    )
    node = command_of(script, termination_grace_s=60)
    node.config["workdir"] = str(node.run_directory)
    async with running(node):
        await eventually(lambda: "deaf" in node.output)
        assert len(node.processes()) >= 4
        (node.run_directory / "go").touch()
        exited = await node.agent.heard(EXITED)
        assert exited.body["signal"] == signal.SIGKILL
        assert node.launcher
        assert node.processes() == [node.launcher.pid], "all is gone before the end is reported"


async def test_what_outlives_a_successful_command_has_the_stop_grace_to_end() -> None:
    polite = "trap 'echo tidied; exit' TERM; touch up; while :; do sleep 0.05; done"
    node = command_of(f'setsid bash -c "{polite}" & while ! [ -e up ]; do sleep 0.05; done; exit 0')
    node.config["workdir"] = str(node.run_directory)
    async with running(node):
        exited = await node.agent.heard(EXITED)
        assert exited.body["exit_code"] == 0
        assert exited.body["log_tail"].endswith("tidied\n")
        assert "leaves processes behind, which are ended now: bash (" in exited.body["log_tail"]


def write_torchrun(folder: Path, script: str) -> None:
    # The first line of a script cannot name a program below a folder with a space.
    (folder / "python").symlink_to(sys.executable)
    (folder / "torchrun").write_text(f"#!{folder}/python\n{script}")
    (folder / "torchrun").chmod(0o755)


@pytest.mark.parametrize("ends_with", [0, 3])
async def test_a_torchrun_in_the_background_of_a_script_is_the_command(ends_with: int) -> None:
    node = command_of("nohup ./torchrun &")
    folder = node.run_directory
    node.config["workdir"] = str(folder)
    torchrun = "import os, sys, time\nopen('up', 'w')\n"
    torchrun += f"while not os.path.exists('go'): time.sleep(0.05)\nsys.exit({ends_with})\n"
    write_torchrun(folder, torchrun)
    async with running(node):
        await eventually((folder / "up").exists)
        await eventually(lambda: "left torchrun in the background" in node.output)
        (folder / "go").touch()
        exited = await node.agent.heard(EXITED)
        assert exited.body["exit_code"] == ends_with
        assert "are ended now" not in exited.body["log_tail"]


async def test_a_torchrun_in_the_background_is_ended_with_its_node() -> None:
    node = command_of("nohup ./torchrun &")
    folder = node.run_directory
    node.config["workdir"] = str(folder)
    write_torchrun(folder, "import time\ntime.sleep(1000)\n")
    async with running(node):
        await eventually(lambda: "left torchrun in the background" in node.output)
        await node.agent.want(run=False)
        assert (await node.agent.heard(EXITED)).body["signal"] == signal.SIGTERM


async def test_a_command_that_leaves_nothing_behind_is_not_said_to() -> None:
    node = command_of("sleep 0.1 & wait")
    async with running(node):
        exited = await node.agent.heard(EXITED)
        assert "leaves" not in exited.body["log_tail"]


async def test_a_command_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    node = command_of("trap '' TERM; echo deaf; while :; do sleep 0.1; done", termination_grace_s=1)
    async with running(node):
        await eventually(lambda: "deaf" in node.output)
        asked_at = time.monotonic()
        await node.agent.want(exit=True)
        assert await node.left() == 0
        assert time.monotonic() - asked_at >= 1
        assert (await node.agent.heard(EXITED)).body["signal"] == 9
        assert node.processes() == []


async def test_a_command_that_saves_on_sigterm_gets_its_grace() -> None:
    node = command_of("trap 'sleep 1; echo saved; exit 0' TERM; echo up; while :; do sleep 0.1; done")
    async with running(node):
        await eventually(lambda: "up" in node.output)
        await node.agent.want(run=False)
        exited = await node.agent.heard(EXITED)
        assert exited.body["exit_code"] == 0
        assert exited.body["log_tail"].endswith("saved\n")


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("{train} 2>&1 | tee $TEST_STEPS_DIR/log; exit 0", id="tee"),
        pytest.param("{train} | grep --line-buffered -v part | tee /dev/null; exit 0", id="filters", marks=LONG),
        pytest.param('{train} | while read -r line; do echo "$line"; done; exit 0', id="loop", marks=LONG),
        pytest.param("exec > >(tee /dev/null) 2>&1; {train}; exit 0", id="substitution", marks=LONG),
        pytest.param("yes | bash -c '{train}; exit 0'", id="answers-to-prompts", marks=LONG),
        pytest.param("timeout 1000 {train}; exit 0", id="timeout"),
        pytest.param("set -m; {train}; exit 0", id="job-control", marks=LONG),
    ],
)
async def test_a_program_in_a_shell_has_its_grace_and_its_output_while_it_saves(script: str) -> None:
    node = command_of(script.format(train=f"{PYTHON} saves_aloud.py"), termination_grace_s=100, stop_grace_s=1)
    async with running(node):
        await eventually(lambda: "trains" in node.output)
        await node.agent.want(exit=True, reason="the job was cancelled")
        assert await node.left() == 0
        assert node.output.endswith("all is saved\n")
        assert node.processes() == []


async def test_what_reads_the_output_of_a_command_is_no_work_that_it_leaves_behind() -> None:
    # The filter takes its time for the last line.
    node = command_of("exec > >(while read -r line; do sleep 0.3; echo ${line}s; done); echo end; exit 0")
    async with running(node):
        assert (await node.agent.heard(EXITED)).body["log_tail"] == "ends\n"


async def test_signals_that_the_parent_of_the_launcher_has_blocked_reach_it_and_its_command() -> None:
    node = command_of("grep SigBlk /proc/self/status; trap 'exit 3' TERM; echo up; while :; do sleep 0.1; done")
    blocking = (
        "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [15]); os.execv(sys.argv[1], sys.argv[1:])"
    )
    node.placed_by = [sys.executable, "-c", blocking]
    async with running(node):
        await eventually(lambda: "up" in node.output)
        assert f"SigBlk:\t{0:016x}" in node.output
        assert node.launcher
        node.launcher.terminate()
        assert (await node.agent.heard(EXITED)).body["exit_code"] == 3


async def test_sigterm_to_the_launcher_ends_the_command_and_is_reported() -> None:
    node = command_of("trap 'echo ending; exit 3' TERM; echo up; while :; do sleep 0.1; done")
    async with running(node):
        await eventually(lambda: "up" in node.output)
        assert node.launcher
        node.launcher.terminate()
        assert await node.left() == 128 + signal.SIGTERM
        assert (await node.agent.heard("/v1/launcher/leaving")).body == {"reason": "the launcher received SIGTERM"}
        assert (await node.agent.heard(EXITED)).body["exit_code"] == 3
        left = json.loads((node.run_directory / "exit.json").read_text())
        assert (left["exit_code"], left["signal"]) == (143, 15)
        assert node.processes() == []


async def test_an_attempt_replaces_the_one_before_it() -> None:
    node = command_of("echo start $$; sleep 1000")
    async with running(node):
        await eventually(lambda: "start" in node.output)
        await node.agent.want(attempt=2)
        assert (await node.agent.heard(EXITED)).body["attempt"] == 1
        await eventually(lambda: node.output.count("start") == 2)
        first, second = (int(line.split()[1]) for line in node.output.splitlines())
        # A process that is being started may be missing from a list of all processes.
        await eventually(lambda: second in node.processes())
        assert first not in node.processes()


async def test_the_command_starts_before_the_agent_does_and_reports_reach_it_later() -> None:
    node = command_of("echo alone; exit 5")
    async with running(node, start_agents=False):
        assert node.launcher
        launcher = node.launcher.pid
        await eventually(lambda: "alone" in node.output and node.processes() == [launcher], what="its command ends")
        await node.agent.start()
        assert (await node.agent.heard(EXITED)).body["exit_code"] == 5


async def test_a_request_not_to_run_from_an_agent_that_knows_of_no_attempt_ends_nothing() -> None:
    node = command_of("echo up; sleep 1000")
    await node.agent.want(run=False, attempt=0)
    async with running(node):
        await node.agent.heard("/v1/launcher/usage")
        await eventually(lambda: "up" in node.output)
        assert node.agent.said(EXITED) == []
        await node.agent.want(run=False, attempt=1)
        assert (await node.agent.heard(EXITED)).body["signal"] == signal.SIGTERM


async def test_usage_of_the_whole_tree_is_reported() -> None:
    begins = "import time; data = bytearray(50_000_000); print('up', flush=True)"
    script = f'{PYTHON} -c "{begins}\nwhile True: sum(range(10**6)); time.sleep(0.15)" & wait'
    node = command_of(script)
    async with running(node):
        await eventually(lambda: "up" in node.output)
        usage = await node.agent.heard(
            "/v1/launcher/usage", lambda body: (body["cpu_cores"] or 0) > 0.03 and body["memory_bytes"] > 50_000_000
        )
        assert usage.body["cpu_cores"] < 4
        assert usage.body["devices"] == [] or usage.body["devices"][0]["memory_total_bytes"] > 0


async def test_the_command_finds_its_environment_and_none_of_the_launchers_secrets() -> None:
    variables = {"K": "V", "PYTHONPATH": "/users/own", "PATH": os.environ["PATH"]}
    node = command_of("env; echo that is all", nodes="2:4", processes=3, env=variables)
    async with running(node):
        await node.agent.heard(EXITED)
        await eventually(lambda: "that is all" in node.output)
        found = dict(line.split("=", 1) for line in node.output.splitlines() if "=" in line)
        assert found["K"] == "V"
        assert (found["PET_NNODES"], found["PET_NPROC_PER_NODE"]) == ("2:4", "3")
        assert found["PET_RDZV_BACKEND"] == "perdure"
        injected, users = found["PYTHONPATH"].split(":")
        assert users == "/users/own"
        assert sorted(path.name.split("-")[0] for path in Path(injected).parent.glob("inject")) == ["inject"]
        assert found["PERDURE_NODE"] == node.name
        assert "PERDURE_LAUNCHER_CONFIG" not in found


async def test_a_log_disk_that_is_full_loses_output_and_nothing_else() -> None:
    # Beyond the limit every write of the launcher fails, as on a full disk.
    node = command_of("for i in $(seq 20000); do echo line $i of the output; done; echo last; exit 4")
    wrapped = node.run_directory / "limited.py"
    wrapped.write_text(
        "import resource, runpy, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "runpy.run_module('perdure_launcher', run_name='__main__')\n"
    )
    node.interpreter_arguments = [str(wrapped)]
    async with running(node):
        exited = await node.agent.heard(EXITED)
        assert exited.body["exit_code"] == 4
        assert exited.body["log_tail"].endswith("line 20000 of the output\nlast\n")
        await eventually(lambda: len(node.output) == 100_000)


async def test_a_launcher_without_a_usable_run_directory_reports_it() -> None:
    node = command_of("true")
    (node.run_directory / "logs").write_text("a file where a folder should be")
    async with running(node):
        assert await node.left(within=DEADLINE) == 73
        assert "cannot be prepared" in json.loads((node.run_directory / "exit.json").read_text())["reason"]


async def test_a_wrong_configuration_is_named_with_its_field() -> None:
    node = command_of("true", nodes="four")
    async with running(node):
        assert await node.left() == 78
        reason = json.loads((node.run_directory / "exit.json").read_text())["reason"]
        assert reason == "nodes: expected a number such as 4, or min:max such as 2:4, found 'four'"


@contextlib.contextmanager
def memory_limited_to(limit: int) -> Iterator[Path]:
    """A memory cgroup of this machine, of either version, as a container has one; yields the file of its processes."""
    first = Path("/sys/fs/cgroup/memory")
    version_1 = first.is_dir()
    group = (first if version_1 else Path("/sys/fs/cgroup")) / f"perdure-test-{secrets.token_hex(4)}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(limit))
    except OSError as error:
        pytest.skip(f"it takes the right to make a memory cgroup: {error}")
    try:
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


async def test_a_kill_for_lack_of_memory_is_told_from_other_kills_and_names_the_limit() -> None:
    # The first attempt needs too much memory, the second one is killed by another process.
    node = command_of(f"mkdir $TEST_STEPS_DIR/first 2>/dev/null || kill -9 $$; exec {PYTHON} -c 'bytearray(900 << 20)'")
    with memory_limited_to(300 << 20) as group:
        node.placed_by = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group)]
        async with running(node):
            exited = (await node.agent.heard(EXITED)).body
            assert (exited["signal"], exited["out_of_memory"], exited["memory_limit"]) == (9, True, 300 << 20)
            await node.agent.want(attempt=2)
            exited = (await node.agent.heard(EXITED)).body
            assert (exited["signal"], exited.get("out_of_memory", False)) == (9, False)
            assert exited.get("memory_limit") is None


@pytest.mark.long("launchers")
@pytest.mark.usefixtures("ranks")
async def test_a_rank_whose_worker_the_kernel_kills_for_lack_of_memory_names_the_limit() -> None:
    """The rank itself is not killed, and its error says nothing about memory."""
    node = Node([*TORCHRUN, "greedy_worker.py"], warm_starts=False)
    with memory_limited_to(1 << 30) as group:
        node.placed_by = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group)]
        async with running(node):
            # Its rank fails before any step.
            (ready,) = await all_ready(node)
            await form_world([node], 1, port=ready.body["store_ports"][0])
            failed = (await node.agent.heard(READY)).body
            assert (failed["out_of_memory"], failed["memory_limit"]) == (True, 1 << 30)
            [culprit] = failed["ranks"]
            assert is_child_lost(culprit["error"])
