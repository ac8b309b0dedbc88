"""Tests of the meaning of exit codes, signals and error texts: a table of real ends of ranks."""

from __future__ import annotations

import signal
from datetime import UTC, datetime
from typing import Any

import pytest

from perdure.contract import Failure, FailureClass, FailureKind, NodeCredentials, RankExit
from perdure.spec.signals import signal_name
from perdure.workflows.policy.diagnosis.classification import (
    classify,
    classify_rank,
    describe_rank,
    node_failure,
)

DEVICE_MEMORY, LOST_GPU = FailureClass.DEVICE_OUT_OF_MEMORY, FailureClass.HARDWARE
VICTIMS = {
    "gloo: closed": "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
    "[10.0.0.1]:45213",
    "gloo: reset": "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Read error "
    "[10.0.0.2]:4411: Connection reset by peer",
    "gloo: write": "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:446] writev [10.0.0.1]:1: "
    "Broken pipe",
    "gloo: mesh": "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] "
    "no error",
    "nccl: remote": "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/"
    "ProcessGroupNCCL.cpp:1970, remote process exited or there was a network error, NCCL version 2.27.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "nccl: aborted": "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.",
    "store: connect": "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying "
    "to connect to (10.0.0.1, 29500).",
    "store: recv": "RuntimeError: recvValue failed on SocketImpl(fd=20, addr=[localhost]:51060): Connection was likely "
    "closed. Did the remote server shutdown or crash?",
    "store: reset": "RuntimeError: Connection reset by peer",
}
WAITED = {
    "gloo: recv": "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
    "1800000ms for recv operation to complete",
    "gloo: send": "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:116] "
    "Timed out waiting 6000ms for send operation to complete",
    "gloo: pair": "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:144] Application timeout caused pair "
    "closure",
    "gloo: rendezvous": "RuntimeError: Gloo connectFullMesh failed with wait timeout after 300000ms, keys: "
    "/default_pg/0//cpu//0/rank_1",
    "gloo: monitored barrier": "RuntimeError: [Rank 0]: Ranks 1 failed to pass monitoredBarrier in 5000 ms",
    "gloo: monitored barrier, one": "RuntimeError: Rank 1 timed out in monitoredBarrier after 5000 ms. "
    "No ranks successfully processed in monitoredBarrier.",
    "nccl: watchdog": "RuntimeError: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=137, "
    "OpType=ALLREDUCE, NumelIn=26214400, NumelOut=26214400, Timeout(ms)=600000) ran for 600020 milliseconds",
    "nccl: terminate": "c10::DistBackendError: [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread "
    "terminated with exception: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=60000) ran for 60081 milliseconds before timing out.",
    "nccl: aborted for it": "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1. Original "
    "reason for failure was: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLGATHER) ran",
    "nccl: heartbeat": "RuntimeError: ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress",
    "store: wait": "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cuda//0",
    "store: wait, older": "RuntimeError: Socket Timeout",
    "store: barrier": "torch.distributed.DistStoreError: barrier timeout after 5000ms, key: b/3",
    "store: clients": "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 joined.",
}
DEVICE_OUT_OF_MEMORY = {
    "cuda": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of "
    "79.11 GiB of which 17.25 MiB is free.",
    "cuda, older": "torch.cuda.OutOfMemoryError: CUDA out of memory.",
    "in nccl": "torch.distributed.DistBackendError: NCCL error: unhandled cuda error, CUDA error: 'out of memory'",
    "in a kernel": "torch.AcceleratorError: CUDA error: out of memory",
}
OUT_OF_MEMORY = {
    "host": "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)",
    "python": "MemoryError: ",
    "fork": "OSError: [Errno 12] Cannot allocate memory",
}
CHILD_LOST = {
    "loader": "RuntimeError: DataLoader worker (pid(s) 4711, 4712) exited unexpectedly",
    "loader, by signal": "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. ",
    "pool": "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly while "
    "the future was running or pending.",
}
"""The kernel kills the process that uses most memory, which a rank's child may be."""
DEVICE_FAULTS = {
    "assertion": "torch.AcceleratorError: CUDA error: device-side assert triggered",
    "assertion, older": "RuntimeError: CUDA error: device-side assert triggered",
    "access": "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "launch": "RuntimeError: CUDA error: unspecified launch failure",
    "ecc": "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
    "seen by nccl's watchdog": "c10::DistBackendError: [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog "
    "thread terminated with exception: CUDA error: an illegal memory access was encountered",
    "seen by a call of nccl": "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled "
    "cuda error, NCCL version 2.27.5. ncclUnhandledCudaError: Call to CUDA function failed. Last error: Cuda failure "
    "710 'device-side assert triggered'. NCCL watchdog",
}
HARDWARE = {
    "nvml": "pynvml.NVMLError_GpuIsLost: GPU is lost",
    "the driver": "RuntimeError: Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the "
    "system to recover this GPU",
    "the kernel": "RuntimeError: NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus.",
    "a link": "RuntimeError: health check: XID 74 on GPU 3",
    "uncontained": "RuntimeError: NVRM: Xid (PCI:0000:3b:00): 95, pid=4711, Uncontained: DRAM",
}
OF_A_SCRIPTS_KERNEL = {
    "a page fault": "RuntimeError: NVRM: Xid (PCI:0000:3b:00): 31, pid=79, name=python, Ch 00000048",
    "a page fault, as driver 580 tells it": "RuntimeError: NVRM: Xid (PCI:0000:00:06): 31, pid=834, name=python3, "
    "channel 0x0000001e, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC1 GPCCLIENT_T1_8 faulted @ 0x83d9_7be00000",
    "an exception": "RuntimeError: Xid 13: Graphics Exception, 48 of 95",
}
"""XIDs that programs cause, beside numbers that would mean hardware."""
DEVICE_MISSING = {
    "none": "RuntimeError: No CUDA GPUs are available",
    "not detected": "torch.AcceleratorError: CUDA error: no CUDA-capable device is detected",
    "unavailable": "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
}
STORAGE = {
    "full": "OSError: [Errno 28] No space left on device: '/ckpt/step-40.pt'",
    "a quota": "OSError: [Errno 122] Disk quota exceeded",
    "stale": "OSError: [Errno 116] Stale file handle: '/data'",
    "broken": "OSError: [Errno 5] Input/output error: '/data/train.bin'",
    "read-only": "OSError: [Errno 30] Read-only file system: '/ckpt'",
    "fuse": "OSError: [Errno 107] Transport endpoint is not connected: '/mnt/bucket'",
    "torch": "RuntimeError: PytorchStreamWriter failed writing file data/3: file write failed",
    "torch's stream": "RuntimeError: basic_ios::clear: iostream error",
    "safetensors": "SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)",
    "s3": "botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the PutObject operation: Please "
    "reduce your request rate.",
}
NETWORK = {
    "requests": "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='hub', port=443): Max retries exceeded "
    "with url: / (Caused by NewConnectionError(': [Errno 111] Connection refused'))",
    "in an error file": "ConnectionError: HTTPSConnectionPool(host='hub', port=443): Max retries exceeded",
    "names": "socket.gaierror: [Errno -3] Temporary failure in name resolution",
    "urllib": "urllib.error.URLError: <urlopen error [Errno 111] Connection refused>",
    "httpx": "httpx.ConnectTimeout: timed out",
    "s3": 'botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL: "https://s3/"',
    "a server's error": "requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url: https://hub/",
}
USERS_OWN = {
    "value": "ValueError: Expected input batch_size (64) to match target batch_size (32).",
    "import": "ModuleNotFoundError: No module named 'wandb'",
    "assert": "AssertionError: loss is NaN at step 120",
    "shapes": "RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x784 and 512x10)",
    "gloo, unequal shapes": "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:446] "
    "op.preamble.length <= op.nbytes. 8 vs 4. ",
    "nccl, misuse": "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
    "file": "FileNotFoundError: [Errno 2] No such file or directory: 'data/train.bin'",
    "a server that refuses": "requests.exceptions.HTTPError: 404 Client Error: Not Found for url: https://hub/m",
    "a timeout of its own": "TimeoutError: socket timeout while downloading the weights",
    "none": None,
}


def failure(kind: FailureKind = FailureKind.COMMAND, **fields: Any) -> Failure:
    sender = NodeCredentials(uid="0123abcd", role="worker", rank=0, incarnation=1, token="t")
    return Failure(sender=sender, sequence=1, time=datetime(2026, 1, 1, tzinfo=UTC), generation=1, kind=kind, **fields)


@pytest.mark.parametrize("text", VICTIMS.values(), ids=VICTIMS)
@pytest.mark.parametrize("how", [{"exit_code": 1}, {"signal": 6}], ids=["raised", "aborted"])
def test_who_fails_because_a_peer_went_away_is_a_victim(text: str, how: dict[str, Any]):
    assert classify_rank(RankExit(local_rank=0, error=text, **how)) is FailureClass.PEER_LOST


@pytest.mark.parametrize("text", WAITED.values(), ids=WAITED)
@pytest.mark.parametrize("how", [{"exit_code": 1}, {"signal": 6}], ids=["raised", "aborted"])
def test_who_waited_in_a_collective_until_its_timeout_did_not_lose_a_connection(text: str, how: dict[str, Any]):
    assert classify_rank(RankExit(local_rank=0, error=text, **how)) is FailureClass.COLLECTIVE_TIMEOUT


@pytest.mark.parametrize("text", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY)
def test_memory_that_ran_out_is_recognised_by_its_text(text: str):
    assert classify_rank(RankExit(local_rank=0, exit_code=1, error=text)) is FailureClass.OUT_OF_MEMORY


@pytest.mark.parametrize("text", DEVICE_OUT_OF_MEMORY.values(), ids=DEVICE_OUT_OF_MEMORY)
def test_memory_of_a_device_is_told_from_the_hosts(text: str):
    assert classify_rank(RankExit(local_rank=0, exit_code=1, error=text)) is FailureClass.DEVICE_OUT_OF_MEMORY


@pytest.mark.parametrize("text", HARDWARE.values(), ids=HARDWARE)
@pytest.mark.parametrize("how", [{"exit_code": 1}, {"signal": 6}], ids=["raised", "aborted"])
def test_a_gpu_that_is_lost_is_no_error_of_the_script(text: str, how: dict[str, Any]):
    assert classify_rank(RankExit(local_rank=0, error=text, **how)) is FailureClass.HARDWARE


@pytest.mark.parametrize("text", OF_A_SCRIPTS_KERNEL.values(), ids=OF_A_SCRIPTS_KERNEL)
def test_what_a_program_does_to_a_gpu_is_no_fault_of_its_hardware(text: str):
    assert classify_rank(RankExit(local_rank=0, exit_code=1, error=text)) is FailureClass.USER_CODE


@pytest.mark.parametrize("text", DEVICE_MISSING.values(), ids=DEVICE_MISSING)
def test_a_gpu_that_is_missing_has_failed_only_where_the_job_has_used_one(text: str):
    exit = RankExit(local_rank=0, exit_code=1, error=text)
    assert classify_rank(exit) is FailureClass.HARDWARE
    assert classify_rank(exit, before_steps=True) is FailureClass.USER_CODE


def test_tensors_of_different_sizes_are_the_scripts_own_fault_also_where_gloo_aborts_the_rank():
    text = (
        "gloo::EnforceNotMet: [enforce fail at gloo/transport/tcp/pair.cc:464] op.preamble.length <= op.nbytes. 8 vs 4"
    )
    assert classify_rank(RankExit(local_rank=0, signal=signal.SIGABRT, error=text)) is FailureClass.USER_CODE


@pytest.mark.parametrize("text", STORAGE.values(), ids=STORAGE)
def test_storage_that_fails_is_named(text: str):
    assert classify_rank(RankExit(local_rank=0, exit_code=1, error=text)) is FailureClass.STORAGE


@pytest.mark.parametrize("text", NETWORK.values(), ids=NETWORK)
def test_a_server_outside_of_the_job_is_no_peer(text: str):
    assert classify_rank(RankExit(local_rank=0, exit_code=1, error=text)) is FailureClass.NETWORK


@pytest.mark.parametrize("text", CHILD_LOST.values(), ids=CHILD_LOST)
@pytest.mark.parametrize(
    ("oom", "expected"), [(True, FailureClass.OUT_OF_MEMORY), (False, FailureClass.USER_CODE)], ids=["oom", "other"]
)
def test_a_rank_whose_child_the_kernel_killed_has_run_out_of_memory(text: str, oom: bool, expected: FailureClass):
    ranks = (RankExit(local_rank=0, global_rank=3, exit_code=1, error=text),)
    known = node_failure(failure(ranks=ranks, out_of_memory=oom, memory_limit=300 << 20 if oom else None))
    assert known.failure is expected
    assert ("the limit is 300 MiB" in known.text) is oom


@pytest.mark.parametrize("text", DEVICE_FAULTS.values(), ids=DEVICE_FAULTS)
@pytest.mark.parametrize("how", [{"exit_code": 1}, {"signal": 6}], ids=["raised", "aborted"])
def test_a_kernel_that_failed_is_the_cause_whatever_call_reports_it(text: str, how: dict[str, Any]):
    assert classify_rank(RankExit(local_rank=0, error=text, **how)) is FailureClass.DEVICE_FAULT


@pytest.mark.parametrize("text", USERS_OWN.values(), ids=USERS_OWN)
def test_errors_of_the_script_are_its_own(text: str | None):
    assert classify_rank(RankExit(local_rank=0, exit_code=1, error=text)) is FailureClass.USER_CODE


@pytest.mark.parametrize(
    ("signal", "oom", "expected"),
    [
        (9, False, FailureClass.KILLED),
        (9, True, FailureClass.OUT_OF_MEMORY),
        (15, False, FailureClass.KILLED),
        (15, True, FailureClass.KILLED),
        *((signal, False, FailureClass.CRASH) for signal in (4, 6, 7, 8, 11)),
    ],
)
def test_signals(signal: int, oom: bool, expected: FailureClass):
    assert classify_rank(RankExit(local_rank=0, signal=signal), out_of_memory=oom) is expected


@pytest.mark.parametrize(
    ("exits", "speaks", "expected"),
    [
        ([{"signal": 15}, {"exit_code": 1, "error": "KeyError: 'x'"}], 1, FailureClass.USER_CODE),
        ([{"exit_code": 1, "error": VICTIMS["gloo: reset"]}, {"signal": 11}], 1, FailureClass.CRASH),
        ([{"exit_code": 1, "error": VICTIMS["gloo: reset"]}, {"signal": 9}], 1, FailureClass.KILLED),
        ([{"exit_code": 1, "error": OUT_OF_MEMORY["host"]}, {"signal": 11}], 0, FailureClass.OUT_OF_MEMORY),
        ([{"exit_code": 1, "error": DEVICE_OUT_OF_MEMORY["cuda"]}, {"signal": 11}], 0, DEVICE_MEMORY),
        ([{"exit_code": 1, "error": USERS_OWN["value"]}, {"exit_code": 1, "error": HARDWARE["nvml"]}], 1, LOST_GPU),
        ([{"exit_code": 1, "error": VICTIMS["gloo: closed"]}] * 2, 0, FailureClass.PEER_LOST),
        (
            [{"exit_code": 1, "error": e} for e in (VICTIMS["gloo: reset"], WAITED["gloo: recv"])],
            1,
            FailureClass.COLLECTIVE_TIMEOUT,
        ),
        ([{"exit_code": 1, "error": WAITED["gloo: recv"]}, {"signal": 11}], 1, FailureClass.CRASH),
    ],
)
def test_the_cause_speaks_for_its_node(exits: list[dict[str, Any]], speaks: int, expected: FailureClass):
    ranks = tuple(RankExit(local_rank=n, global_rank=n, **exit) for n, exit in enumerate(exits))
    found, text, exit_code = classify(failure(FailureKind.RANKS, ranks=ranks))
    assert found is expected
    assert text == describe_rank(ranks[speaks])
    assert exit_code == ranks[speaks].exit_code


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"exit_code": 127}, FailureClass.LAUNCH),
        ({"exit_code": 126}, FailureClass.LAUNCH),
        ({"exit_code": 1}, FailureClass.USER_CODE),
        ({"exit_code": 0}, FailureClass.COMMAND_LOST),
        ({"signal": 9}, FailureClass.COMMAND_LOST),
        ({"signal": 9, "out_of_memory": True}, FailureClass.OUT_OF_MEMORY),
        ({"kind": FailureKind.UNPROTECTED}, FailureClass.UNPROTECTED),
        ({"kind": FailureKind.RANKS}, FailureClass.PEER_LOST),
        ({"kind": FailureKind.RENDEZVOUS}, FailureClass.RENDEZVOUS_TIMEOUT),
        ({"kind": FailureKind.NODE, "exit_code": 1}, FailureClass.DISRUPTED),
    ],
)
def test_ends_of_commands(fields: dict[str, Any], expected: FailureClass):
    found, text, _ = classify(failure(**fields))
    assert found is expected
    assert text
    assert classify(failure(message="said by the launcher", **fields))[1] == "said by the launcher"


@pytest.mark.parametrize(
    ("exit", "says"),
    [
        (RankExit(local_rank=1, global_rank=3, signal=11), "rank 3 SIGSEGV"),
        (RankExit(local_rank=1, exit_code=1), "rank (local 1) exit code 1"),
        (RankExit(local_rank=0, global_rank=0, exit_code=1, error="E: x"), "rank 0 exit code 1: E: x"),
        (RankExit(local_rank=0, global_rank=0, signal=40), "rank 0 signal 40"),
    ],
)
def test_ends_are_described_for_people(exit: RankExit, says: str):
    assert describe_rank(exit) == says


def test_signals_are_named_as_the_system_names_them():
    import signal

    for number in (4, 6, 7, 8, 9, 11, 15):
        assert signal_name(number) == signal.Signals(number).name


@pytest.mark.parametrize(("exit_code", "name"), [(137, "SIGKILL"), (143, "SIGTERM"), (139, "SIGSEGV")])
def test_a_shell_that_reports_a_signal_did_not_fail_by_itself(exit_code: int, name: str):
    found, text, code = classify(failure(exit_code=exit_code, message=f"the command exited with {exit_code}"))
    assert found is FailureClass.COMMAND_LOST
    assert text == f"the command exited with {exit_code}, as a shell does when {name} ended its child"
    assert code == exit_code
    assert classify(failure(exit_code=exit_code, out_of_memory=True))[0] is FailureClass.OUT_OF_MEMORY


@pytest.mark.parametrize(("exit_code", "name"), [(247, "SIGKILL"), (245, "SIGSEGV")])
def test_a_launcher_that_passes_on_the_signal_of_its_child_did_not_fail_by_itself(exit_code: int, name: str):
    found = FailureClass.KILLED if name == "SIGKILL" else FailureClass.CRASH
    assert classify_rank(RankExit(local_rank=0, exit_code=exit_code)) is found
    assert describe_rank(RankExit(local_rank=0, exit_code=exit_code)).endswith(
        f"as of a launcher whose child got {name}"
    )


@pytest.mark.parametrize("exit_code", [1, 3, 128, 128 + 12, 128 + 64, 253, 254, 255])
def test_other_exit_codes_are_the_commands_own(exit_code: int):
    assert classify(failure(exit_code=exit_code))[0] is FailureClass.USER_CODE
    assert classify_rank(RankExit(local_rank=0, exit_code=exit_code)) is FailureClass.USER_CODE


@pytest.mark.parametrize(
    ("exit_code", "expected"), [(137, FailureClass.KILLED), (143, FailureClass.KILLED), (134, FailureClass.CRASH)]
)
def test_a_rank_that_is_a_shell_is_read_alike_where_no_exception_is_known(exit_code: int, expected: FailureClass):
    assert classify_rank(RankExit(local_rank=0, exit_code=exit_code)) is expected
    raised = RankExit(local_rank=0, exit_code=exit_code, error="ValueError: bad batch")
    assert classify_rank(raised) is FailureClass.USER_CODE
    assert describe_rank(RankExit(local_rank=0, exit_code=137)).endswith("as of a shell whose child got SIGKILL")


def test_a_command_that_failed_outside_of_its_ranks_is_described_by_the_error_that_it_printed():
    reported = failure(exit_code=1, message="the command exited with 1", error="ModuleNotFoundError: No module named x")
    assert classify(reported)[1] == "the command exited with 1: ModuleNotFoundError: No module named x"


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        (300 << 20, "its container's memory ran out; the limit is 300 MiB"),
        (64 << 30, "its container's memory ran out; the limit is 64.0 GiB"),
        (None, "the memory of its machine ran out"),
    ],
)
@pytest.mark.parametrize("ranks", [(), (RankExit(local_rank=0, global_rank=3, signal=9),)])
def test_a_kill_for_lack_of_memory_names_the_limit(ranks: tuple[RankExit, ...], limit: int | None, told: str):
    known = node_failure(failure(signal=9, ranks=ranks, out_of_memory=True, memory_limit=limit))
    assert known.failure is FailureClass.OUT_OF_MEMORY
    assert known.text.endswith(f"SIGKILL: the kernel killed it because {told}")
