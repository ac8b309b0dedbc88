"""Tests of jobs through the command line: real server, worker, agents and processes, on a pipe and a terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from perdure.base.state_folder import StateFolder
from perdure.client.sync import SyncClient
from perdure.contract import JobPhase
from perdure.local.control_plane import LocalControlPlane
from tests.support.command_line import PERDURE, STEPS, CommandLine, Finished, end_nodes
from tests.support.waiting import DEADLINE
from tests.support.warm_agents import warm_name

WAITS = f"{STEPS}; echo started as rank $RANK of $WORLD_SIZE; while [ ! -e finish ]; do sleep 0.1; done; echo finishing"
"""A training of any length, which ends when the file `finish` appears in its folder."""

FAILS_LOUDLY = r"printf '\033]52;c;aGk=\007the data is gone\n' >&2; exit 7"
"""A command whose output would write to the clipboard of a terminal."""


def submit(command_line: CommandLine, jobs: SyncClient, name: str, *, nodes: str = "1") -> None:
    """Starts a job, and returns when it runs."""
    done = command_line.run("run", "-d", "--name", name, "--nodes", nodes, "--", "sh", "-c", WAITS)
    assert done.code == 0, done
    assert f"Submitted {name}" in done.out
    assert f"perdure watch {name}" in done.out.splitlines()[-1]
    reaches(jobs, name, JobPhase.RUNNING)


def reaches(jobs: SyncClient, name: str, phase: JobPhase, *, nodes: int | None = None) -> None:
    """Waits until the job is in a phase, and its world has so many nodes."""
    deadline = time.monotonic() + DEADLINE
    for snapshot in jobs.watch(name, interval=timedelta(seconds=0.2)):
        status = snapshot.status
        if status and status.phase is phase and nodes in (None, status.nodes):
            return
        assert time.monotonic() < deadline, f"{name} did not become {phase}: {snapshot}"
    raise AssertionError(f"{name} ended before it was {phase}")


def finish(command_line: CommandLine) -> None:
    (command_line.folder / "finish").touch()


SPEAK_IN_TURN = """
wait_for() { while sleep 0.1; [ ! -e $1 ]; do :; done; }
say() { echo $1; until grep -qs $1 $PERDURE_PROGRESS_DIR/../logs/output.log; do sleep 0.1; done; touch said-$1; }
if [ $RANK = 1 ]; then
    say one; wait_for said-two; say three
else
    wait_for said-one; say two
fi
"""
"""Lines have the times at which they are read from the command: each is in the log before the next is printed."""


def test_run_shows_a_job_to_its_end_on_a_pipe(command_line: CommandLine, job_name: str) -> None:
    done = command_line.run("run", "--name", job_name, "--nodes", "2", "--", "sh", "-c", SPEAK_IN_TURN)
    assert done.code == 0, done
    assert "\x1b" not in done.out, "a pipe gets plain lines"
    lines = done.out.splitlines()
    assert lines[0].startswith(f"Submitted {job_name} to the local server at 127.0.0.1:")
    assert any("Temporal UI: http://127.0.0.1:" in line for line in lines)
    assert any("SUCCEEDED" in line for line in lines)
    assert f"perdure logs {job_name}" in lines[-1]
    logs = command_line.run("logs", job_name)
    assert logs.code == 0
    assert logs.out == "  1 | one\n  0 | two\n  1 | three\n"
    assert command_line.run("logs", job_name, "--node", "0").out == "two\n"
    chosen = command_line.run("logs", job_name, "--since", "1h", "--grep", "^t", "-t").out.splitlines()
    assert [line.partition(" ")[2] for line in chosen] == ["  0 | two", "  1 | three"]
    assert chosen == sorted(chosen)
    ended = command_line.run("logs", job_name, "--rank", "1")
    assert (ended.code, "has no world with rank 1 now; choose by --node instead" in ended.err) == (2, True), ended
    later = command_line.run("logs", job_name, "--since", "2199-01-01")
    assert (later.code, later.out) == (0, "")
    assert "nothing that was printed is chosen" in later.err


def test_a_script_that_always_fails_is_exit_code_1_with_its_own_words(command_line: CommandLine, job_name: str) -> None:
    command_line.write(
        "job.yaml",
        f"name: {job_name}\n"
        f"roles: {{worker: {{nodes: 1, command: {json.dumps(['sh', '-c', FAILS_LOUDLY])}}}}}\n"
        "retry: {max_restarts: 1}\n",
    )
    done = command_line.run("submit", "job.yaml", "--wait")
    assert done.code == 1, done
    assert "FAILED" in done.out
    assert "the data is gone" in done.out
    assert "\x1b" not in done.out, "what a script prints must not steer the terminal"
    assert f"perdure explain {job_name}" in done.out.splitlines()[-1]
    told = command_line.run("explain", job_name)
    assert told.code == 0, told
    assert "\x1b" not in told.out
    assert "\x1b" not in command_line.run("logs", job_name).out
    for label in ("SAW", "MEANS", "DID", "TOOK", "YOU"):
        assert f"\n{label} " in told.out, told.out
    incidents = command_line.run("explain", job_name, "-o", "json").json
    assert command_line.run("explain", job_name, "1", "-o", "json").json == incidents[0]
    assert [action["kind"] for action in incidents[0]["actions"]] == ["RESTART_RANKS"]
    assert [action["kind"] for action in incidents[-1]["actions"]] == ["STOP"]
    none = command_line.run("explain", job_name, "99")
    assert none.code == 2
    assert "its incidents are: 1" in none.err


@pytest.fixture(scope="module")
def waiting(
    control_plane: LocalControlPlane, jobs: SyncClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A job of two nodes that runs, for all tests that only look at it."""
    command_line = CommandLine.local(tmp_path_factory.mktemp("waiting"), control_plane.state.path)
    name = warm_name()
    submit(command_line, jobs, name, nodes="2")
    yield name
    finish(command_line)
    assert jobs.wait(name).exit_code == 0


def test_a_job_is_looked_at_from_all_sides(command_line: CommandLine, waiting: str) -> None:
    status = command_line.run("status", waiting)
    assert status.code == 0
    assert f"{waiting}  RUNNING, 2 nodes" in status.out
    for label in ("GOOD", "CONTROL", "NEXT", "UI"):
        assert f"\n{label} " in status.out
    nodes = command_line.run("nodes", waiting, "-o", "json").json
    assert [(node["rank"], node["phase"], node["group_rank"]) for node in nodes] == [(0, "READY", 0), (1, "READY", 1)]
    table = command_line.run("nodes", waiting).out
    assert table.count(nodes[0]["host"]) == 2
    listed = command_line.run("list", "--running", "-o", "json").json
    (job,) = [job for job in listed if job["name"] == waiting]
    assert (job["phase"], job["namespace"], job["world_size"]) == ("RUNNING", "default", 2)
    assert waiting in command_line.run("list").out
    assert waiting not in command_line.run("list", "-n", "other").out
    uninterrupted = command_line.run("explain", waiting)
    assert uninterrupted.out.startswith(f"{waiting} was never interrupted")


def test_a_running_name_is_refused_with_remedies(command_line: CommandLine, waiting: str) -> None:
    again = command_line.run("run", "--name", waiting, "--", "sh", "-c", "true")
    assert again.code == 2, again
    assert f'a job named "{waiting}" is already running' in again.err
    assert f"perdure cancel {waiting} --wait" in again.err
    assert "--name" in again.err


def test_an_unknown_name_suggests_the_nearest(command_line: CommandLine, waiting: str) -> None:
    typo = command_line.run("status", waiting[:-1])
    assert typo.code == 2
    assert f"Did you mean {waiting}" in typo.err
    elsewhere = command_line.run("status", waiting, "-n", "other")
    assert elsewhere.code == 2
    assert "add -n default" in elsewhere.err


@pytest.mark.long("commands")
def test_a_caller_without_the_keys_is_told_which_are_missing(
    command_line: CommandLine, control_plane: LocalControlPlane, waiting: str
) -> None:
    server = control_plane.status().server
    assert server is not None
    stranger = CommandLine.local(command_line.folder, command_line.folder / "elsewhere")
    for command in ("status", "explain", "nodes"):
        done = stranger.run(command, waiting, "--address", server.address)
        assert done.code == 2, done
        assert "cannot be decrypted: it needs the key" in done.err
        assert "Set PERDURE_PAYLOAD_KEYS_FILE" in done.err
        assert "Traceback" not in done.err


@pytest.mark.long("commands")
def test_what_is_requested_is_refused_or_planned_without_a_change(command_line: CommandLine, waiting: str) -> None:
    refused = command_line.run("resume", waiting)
    assert refused.code == 2
    assert "not suspended" in refused.err
    refused = command_line.run("resume-repairs", waiting)
    assert refused.code == 2
    assert "not paused" in refused.err
    for arguments in (
        ["scale", waiting, "1"],
        ["suspend", waiting],
        ["restart", waiting],
        ["restart", waiting, "--node", "0"],
        ["restart", waiting, "--node", "0", "--role", "worker"],
        ["pause-repairs", waiting, "--for", "5m"],
    ):
        plan = command_line.run(*arguments, "--dry-run", "-o", "json")
        assert plan.code == 0, plan
        assert plan.json["phase"] == "RUNNING"
    plan = command_line.run("cancel", waiting, "--dry-run")
    assert plan.code == 0
    assert "nothing was changed" in plan.out
    known = command_line.run("status", waiting, "-o", "json").json
    assert (known["phase"], known["nodes"], known["generation"]) == ("RUNNING", 2, 1)


ASKED_OF_A_ROLE = (
    ("scale", "1"),
    ("nodes",),
    ("restart", "--node", "0", "--dry-run"),
    ("scale", "1", "--dry-run"),
    ("restart", "--node", "0"),
    ("restart", "--dry-run"),
    ("logs",),
    ("logs", "--rank", "0"),
    ("stacks",),
    ("shell", "--node", "0", "--print"),
)


@pytest.mark.parametrize(
    "asked", [ASKED_OF_A_ROLE[:3], pytest.param(ASKED_OF_A_ROLE[3:], marks=pytest.mark.long("commands"))]
)
def test_a_role_that_the_job_does_not_have_is_a_wrong_option(
    command_line: CommandLine, waiting: str, asked: tuple[tuple[str, ...], ...]
) -> None:
    for command, *options in asked:
        done = command_line.run(command, waiting, *options, "--role", "trainer")
        assert done.code == 2, done
        assert 'role: got "trainer"; this job has the role "worker"' in done.err


def test_a_role_that_the_job_has_may_be_named(command_line: CommandLine, waiting: str) -> None:
    assert command_line.run("nodes", waiting, "--role", "worker", "-o", "json").json
    assert command_line.run("restart", waiting, "--role", "worker", "--dry-run").code == 0


@pytest.mark.long("commands")
def test_logs_follow_until_the_job_ends(command_line: CommandLine, jobs: SyncClient, job_name: str) -> None:
    submit(command_line, jobs, job_name)
    with command_line.start("logs", job_name, "-f") as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "  0 | started as rank 0 of 1\n"
        assert command_line.run("logs", job_name, "--rank", "0-7").out == "  0 | started as rank 0 of 1\n"
        finish(command_line)
        assert "  0 | finishing\n" in following.stdout.read()
        assert following.wait(DEADLINE) == 0
    tail = command_line.run("logs", job_name, "--tail", "1", "-o", "json")
    line = json.loads(tail.out)
    assert line.pop("time")
    assert line == {"role": "worker", "node": 0, "incarnation": 1, "text": "finishing"}


@pytest.mark.long("commands")
def test_cancel_ends_the_job_and_its_processes(command_line: CommandLine, jobs: SyncClient, job_name: str) -> None:
    submit(command_line, jobs, job_name)
    with command_line.start("watch", job_name) as watching:
        done = command_line.run("cancel", job_name, "--wait")
        assert done.code == 0, done
        assert f"{job_name} is cancelled; its nodes are gone" in done.out
        assert watching.wait(DEADLINE) == 4
    assert jobs.status(job_name).phase is JobPhase.CANCELLED
    again = command_line.run("cancel", job_name)
    assert again.code == 2
    assert "has ended as CANCELLED" in again.err


@pytest.mark.long("commands")
def test_suspend_resume_scale_and_restart(command_line: CommandLine, jobs: SyncClient, job_name: str) -> None:
    submit(command_line, jobs, job_name)
    scaled = command_line.run("scale", job_name, "2")
    assert scaled.code == 0, scaled
    assert f"perdure watch {job_name}" in scaled.out.splitlines()[-1]
    reaches(jobs, job_name, JobPhase.RUNNING, nodes=2)
    assert command_line.run("restart", job_name, "--reason", "a try").code == 0
    reaches(jobs, job_name, JobPhase.RUNNING, nodes=2)
    assert "a try" in command_line.run("explain", job_name).out
    assert command_line.run("suspend", job_name, "--reason", "making room").code == 0
    reaches(jobs, job_name, JobPhase.SUSPENDED)
    assert f"perdure resume {job_name}" in command_line.run("status", job_name).out
    resumed = command_line.run("resume", job_name, "-o", "json")
    assert resumed.code == 0, resumed
    assert resumed.json["message"]
    reaches(jobs, job_name, JobPhase.RUNNING, nodes=2)
    finish(command_line)


def test_ctrl_c_detaches_and_the_job_continues(command_line: CommandLine, jobs: SyncClient, job_name: str) -> None:
    with command_line.start("run", "--name", job_name, "--", "sh", "-c", WAITS, program=PERDURE) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if "RUNNING" in line:
                break
        running.send_signal(signal.SIGINT)
        rest = running.stdout.read()
        assert running.wait(DEADLINE) == 130
    assert f"Detached; {job_name} continues." in rest
    assert f"perdure watch {job_name}" in rest
    assert f"perdure cancel {job_name}" in rest
    assert jobs.status(job_name).phase is JobPhase.RUNNING
    finish(command_line)
    assert jobs.wait(job_name).exit_code == 0


@pytest.mark.long("commands")
def test_a_terminal_shows_a_live_picture(command_line: CommandLine, job_name: str) -> None:
    terminal = command_line.on_terminal("run", "--name", job_name, "--nodes", "2", "--", "sh", "-c", WAITS)
    terminal.expect(f"{job_name}  RUNNING")
    terminal.expect("2 nodes   world of 2 ranks   generation 1")
    terminal.expect("NODES")
    terminal.expect("http://127.0.0.1:")
    assert "\x1b[" in terminal.raw, "a terminal gets colours"
    terminal.interrupt()
    assert terminal.leave() == 130
    assert f"Detached; {job_name} continues." in terminal.text
    watching = command_line.on_terminal("watch", job_name)
    watching.expect("[e]xplain  [l]ogs  [q]uit")
    watching.press("l")
    watching.expect("started as rank")
    watching.press("q")
    assert watching.leave() == 130
    typed_ahead = command_line.on_terminal("watch", job_name)
    typed_ahead.press("l")
    typed_ahead.expect("started as rank")
    typed_ahead.press("q")
    assert typed_ahead.leave() == 130
    finish(command_line)
    ending = command_line.on_terminal("watch", job_name)
    ending.expect("SUCCEEDED")
    assert ending.leave() == 0


def test_doctor_finds_everything_in_order(command_line: CommandLine) -> None:
    done = command_line.run("doctor", "-o", "json")
    checks = {check["name"]: check for check in done.json}
    assert done.code == 0, done
    assert {name for name, check in checks.items() if check["verdict"] == "failed"} == set()
    assert checks["search attributes"]["detail"] == "all there"
    assert (
        checks["torch"]["facts"]["collectives over gloo"] == checks["torch"]["facts"]["step times over gloo"] == "told"
    )
    assert checks["torch"]["facts"]["step times over NCCL"] in ("not told", "told where TORCH_NCCL_ENABLE_TIMING is 1")
    assert "perdure-worker/" in checks["worker on perdure"]["detail"]
    assert "perdure-worker/" in checks["worker on perdure-watch"]["detail"]
    text = command_line.run("doctor")
    assert text.code == 0
    assert "temporal server" in text.out


@pytest.mark.long("commands")
def test_an_outage_is_shown_and_survived(
    bare_command_line: CommandLine, job_name: str, request: pytest.FixtureRequest
) -> None:
    """The worker and the server die under a job that is watched; the job, and the watching, continue."""
    state = bare_command_line.folder / "state"
    running = bare_command_line.start("run", "--name", job_name, "--", "sh", "-c", WAITS)
    assert running.stdout is not None
    seen: list[str] = []

    def read_until(words: str) -> None:
        assert running.stdout is not None
        for line in running.stdout:
            seen.append(line)
            if words in line:
                return
        raise AssertionError(f"{words!r} was not printed, but: {''.join(seen)}")

    try:
        read_until("RUNNING")
        plane = LocalControlPlane(StateFolder(state))
        request.addfinalizer(plane.kill_server)
        request.addfinalizer(plane.kill_worker)
        plane.kill_worker()
        plane.kill_server()
        read_until("AWAY")
        dead = bare_command_line.run("status", job_name)
        assert dead.code == 6, dead
        assert "perdure worker --detach" in dead.err
        back = bare_command_line.run("worker", "--detach")
        assert back.code == 0, back
        read_until("RUNNING")
        status = bare_command_line.run("status", job_name, "-o", "json").json
        assert (status["phase"], status["generation"]) == ("RUNNING", 1), "nothing was restarted"
        finish(bare_command_line)
        read_until("SUCCEEDED")
        assert running.wait(DEADLINE) == 0
        stopped = bare_command_line.run("worker", "--stop")
        assert "stopped the worker and the Temporal server" in stopped.out
    finally:
        running.kill()
        running.wait()


@pytest.mark.long("commands")
def test_a_disk_that_fills_up_under_a_job_ends_nothing(bare_command_line: CommandLine, job_name: str) -> None:
    state = bare_command_line.folder / "state"
    state.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=192m", "tmpfs", str(state)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.strip()}")
    plane = LocalControlPlane(StateFolder(state))
    try:
        running = bare_command_line.start("run", "--name", job_name, "--", "sh", "-c", WAITS)
        assert running.stdout is not None
        for line in running.stdout:
            if "RUNNING" in line:
                break
        with (state / "filler").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, StateFolder(state).free_bytes())
        refused = bare_command_line.run("run", "--", "sh", "-c", "true")
        assert refused.code == 6, refused
        assert "is full" in refused.err
        assert bare_command_line.run("doctor").code == 3
        (state / "filler").unlink()
        finish(bare_command_line)
        rest = running.stdout.read()
        assert running.wait(DEADLINE) == 0, rest
        assert "1 generation, 0 restarts" in rest
    finally:
        plane.kill_worker()
        plane.kill_server()
        end_nodes(state)
        subprocess.run(["umount", "--lazy", str(state)], check=True)


PLAN = """
apiVersion: elastic.iml.github.io/v1alpha1
kind: ScalePlan
metadata: {{name: plan}}
spec: {{ownerJob: {job}, {content}}}
"""


@pytest.mark.long("commands")
def test_a_plan_of_dlrover_scales_a_job_and_replaces_a_node(
    command_line: CommandLine, jobs: SyncClient, job_name: str
) -> None:
    submit(command_line, jobs, job_name)

    def carry_out(content: str, *options: str, job: str = job_name) -> Finished:
        command_line.write("plan.yaml", PLAN.format(job=job, content=content))
        return command_line.run("scale", job_name, "--scale-plan", "plan.yaml", *options)

    more = "psHosts: [x], replicaResourceSpecs: {worker: {replicas: 2, resource: {cpu: 4}}}"
    planned = carry_out(more, "--dry-run")
    assert (planned.code, planned.out) == (0, "would scale worker to 2 nodes; nothing was changed\n")
    assert 'warning: spec.psHosts (["x"]): left out: a job itself' in planned.err
    assert "spec.replicaResourceSpecs.worker.resource" in planned.err
    assert carry_out(more).code == 0
    reaches(jobs, job_name, JobPhase.RUNNING, nodes=2)

    for refused, expected in [
        (carry_out("removePods: [x-worker-0]"), "plan.yaml: spec.removePods[0]: worker would keep its nodes 0 to 0"),
        (carry_out(more, job="other"), f'spec.ownerJob: got "other"; expected "{job_name}", the job to change'),
    ]:
        assert (refused.code, refused.out) == (2, "")
        assert expected in refused.err

    replaced = carry_out(f"migratePods: [{{name: {job_name}-edljob-worker-1}}]", "--reason", "slow", "-o", "json")
    assert replaced.code == 0, replaced
    (entry,) = replaced.json
    assert entry["message"].startswith("node 1 is being replaced")
    assert entry["request"] == {"rank": 1, "role": "worker", "reason": "slow", "resources": {}}
    reaches(jobs, job_name, JobPhase.RUNNING, nodes=2)
    finish(command_line)
